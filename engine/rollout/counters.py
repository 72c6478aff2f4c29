"""Counts of an engine's samples, and their rate."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

EVENTS = (
    "sampled_tokens", "drafted_tokens", "accepted_tokens", "steps", "failed_steps", "forks", "rewinds", "pruned",
    "failed_calls", "appends_too_long", "flop", "held_out_flop", "scored_flop",
)  # fmt: skip


@dataclass
class Counters:
    """Tokens of finished trees: ``logical`` is the sum over root-to-leaf paths, ``unique`` counts shared ones once; and
    the seconds of the engine's steps. ``before``: counts of the engine's loop when these were 0."""

    before: Counter[str] = field(default_factory=Counter)
    logical: int = 0
    unique: int = 0
    seconds: float = 0.0

    def read(self, counts: Counter[str]) -> dict[str, float]:
        """Return the counters, with those of the engine's loop.

        ``logical_tokens`` (sum over root-to-leaf paths) and ``unique_tokens`` of finished trees, and both per second;
        ``sampled_tokens``, ``drafted_tokens`` and how many of those were accepted (``accepted_tokens``); ``steps``,
        ``failed_steps`` (they ended every request that they computed), ``forks``, ``rewinds``, ``pruned``,
        ``failed_calls``, ``appends_too_long``; ``flop`` of all steps (prompts, drafts and the head, see `CostModel`),
        ``held_out_flop``, the part for held-out problems, and ``scored_flop``, that of `RolloutEngine.score`.
        ``bubble``: of the unfinished branches, summed over the steps, the share that sampled nothing.
        """
        counts = counts - self.before
        branch_steps = counts["row_steps"] + counts["idle_row_steps"]
        return {
            **{name: counts[name] for name in EVENTS},
            "bubble": counts["idle_row_steps"] / branch_steps if branch_steps else 0.0,
            "logical_tokens": self.logical,
            "unique_tokens": self.unique,
            "logical_tokens_per_s": self.logical / self.seconds if self.seconds else 0.0,
            "unique_tokens_per_s": self.unique / self.seconds if self.seconds else 0.0,
        }
