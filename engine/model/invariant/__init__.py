"""Models whose tokens have the same bits wherever they are computed (`model.batch_invariant`)."""
