"""Tasks in Harbor's format: what a folder says, its container, and the episodes in it.

Harbor's own package is not used: it needs Python 3.12 and a hundred packages, among them clients of a dozen hosted
services, and runs containers by compose files; `openenv.harbor` runs whole trials with it.
"""
