"""Environments and tools that other processes serve: OpenEnv's protocol."""
