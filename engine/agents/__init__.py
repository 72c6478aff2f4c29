"""Agents: programs that own their loop and call an endpoint; what they sampled becomes one tree a group.

    agent (start) --HTTP--> door --Episode, Session--> sampler --jobs--> the inner sampler
    calls of all episodes (records) --tree--> one TokenTree

`sampler` ties them together, so begin there; `session` decides which tokens a call keeps, `tree` what is trained.
"""
