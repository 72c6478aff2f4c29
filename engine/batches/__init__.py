"""Trees as micro-batches: which tokens share a row, how trees are packed, cut and divided between ranks."""
