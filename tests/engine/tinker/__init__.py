"""Tests of the training service; those with the client need the package of that name, which the extra brings."""
