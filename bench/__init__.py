"""rolltree.bench: each op beside plain PyTorch, its peers and the hardware's own limit. `python -m rolltree.bench`."""
