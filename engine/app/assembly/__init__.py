"""A run made of its configuration."""
