"""Benchmarks of single ops."""
