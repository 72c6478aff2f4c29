"""The verifier of mathematical answers: notation, reading, comparison.

Imports nothing of rolltree but files of `rewards/` with the same property, like `rewards/verifiers.py`.
"""
