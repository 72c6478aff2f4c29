"""Teachers: several of whom each tree has one, and those on a server."""
