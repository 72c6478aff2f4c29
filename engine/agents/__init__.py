"""Agents: programs that own their loop and call an endpoint; what they sampled becomes one tree a group."""
