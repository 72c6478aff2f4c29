"""Benchmarks of whole jobs: several trainers on one job, and curves of recipes."""
