"""Benchmarks of training steps, rollouts, loops and whole runs."""
