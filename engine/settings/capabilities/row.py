"""A row of the table of what does not go together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...errors import RefusedError

Subject = TypeVar("Subject", contravariant=True)
Fires = Mapping[str, object] | bool
"""False: the row does not fire; True: it does; a mapping: it does, with these words for its sentence."""


@dataclass(frozen=True)
class Row(Generic[Subject]):
    """Two things that do not go together; the sentence is "``why``; ``remedy``"."""

    feature: str
    """A key or a value of one, as the documentation shows it."""
    other: str
    """The key, value or condition that it does not go with."""
    when: Callable[[Subject], Fires]
    why: str
    """Beginning of the sentence; `when` fills in words in braces."""
    remedy: str = ""
    """End of the sentence; empty where its beginning is a demand."""

    def sentence(self, subject: Subject) -> str | None:
        """Return the sentence without a full stop if ``subject`` has both things, else None."""
        fires = self.when(subject)
        if fires is False:
            return None
        words = {} if fires is True else fires
        return "; ".join(part.format(**words) for part in (self.why, self.remedy) if part)


def refuse(rows: Iterable[Row[Subject]], subject: Subject) -> None:
    """Check that no row forbids ``subject``.

    Raises:
        RefusedError: with the sentences of all rows that do, in their order.
    """
    if refusals := [said for row in rows if (said := row.sentence(subject)) is not None]:
        raise RefusedError(refusals)


def against(
    feature: str,
    has: Callable[[Subject], Fires],
    why: str,
    remedy: str,
    others: Mapping[str, Callable[[Subject], Fires]],
) -> tuple[Row[Subject], ...]:
    """Return a row for each of ``others``, by the words for it that replace ``{other}`` in the sentence.

    Args:
        has: tells whether the run has ``feature``, and may give words for the sentence.
    """

    def row(other: str, has_other: Callable[[Subject], Fires]) -> Row[Subject]:
        def both(subject: Subject) -> Fires:
            first, second = has(subject), has_other(subject)
            if first is False or second is False:
                return False
            return {**({} if first is True else first), **({} if second is True else second)}

        return Row(feature, other, both, why.replace("{other}", other), remedy.replace("{other}", other))

    return tuple(row(other, has_other) for other, has_other in others.items())
