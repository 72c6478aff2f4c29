"""How a name in a configuration becomes an object, and how code of the user's is called.

``resolve`` finds a part by name or as ``file.py:object`` and checks its options; ``calling`` calls the user's functions
and turns what they raise into one sentence.
"""
