"""Processes of a run: engines, ranks and reward hosts, what starts them, and how weights reach them."""
