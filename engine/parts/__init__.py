"""Turns names in a configuration into objects, and calls the user's code safely.

``resolve`` finds a part by name in a table or imports ``file.py:object``, checks its options against the signature, and
returns the function or instance. ``calling`` calls the user's functions and turns their exceptions into one sentence.
Read ``resolve`` first.
"""
