"""Texts of models and other programs, fit for a terminal."""

from __future__ import annotations

import unicodedata

REORDERING = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the order in which a terminal shows the others."""


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped but for newlines and tabs: a terminal would obey them."""
    return "".join(c.encode("unicode_escape").decode() if _obeyed(c) else c for c in text)


def _obeyed(c: str) -> bool:
    return c in REORDERING or (c not in "\n\t" and unicodedata.category(c) == "Cc")
