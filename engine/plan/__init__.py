"""Runs that are not run: models of step times and sizes, virtual processes, and simulated runs."""
