"""The verifier of programs: the tests of a problem, their harness, and the verdict.

Imports nothing of rolltree but files of `rewards/` with the same property, like `rewards/verifiers.py`.
"""
