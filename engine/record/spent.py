"""The FLOP of a run's steps, and those at which it reached its targets on held-out problems (`evaluation.targets`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

FELL = 0.03
"""A target counts as held if the next evaluation is at most so far below it."""


class FlopAccount:
    """The FLOP of each step, by purpose."""

    def __init__(self) -> None:
        self._before: Counter[str] = Counter()

    def read(self, tally: Counter[str], computed: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the step.

        Args:
            tally: of the sampler, since the start; see `Sampler.tally`.
            computed: ``perf/flop_trained`` and ``perf/flop_scored`` of the learner, 0 where one is absent.
            before: metrics of the last step.
        """
        since = tally - self._before
        self._before = tally.copy()
        evaluated = float(since["held_out_flop"])
        sampled = since["flop"] - evaluated
        scored = computed.get("perf/flop_scored", 0.0) + since["scored_flop"]
        trained = computed.get("perf/flop_trained", 0.0)
        spent = sampled + scored + trained
        return {
            "perf/flop_sampled": sampled,
            "perf/flop_scored": scored,
            "perf/flop_trained": trained,
            "perf/flop_evaluated": evaluated,
            "perf/flop": spent + evaluated,
            "perf/flop_so_far": before.get("perf/flop_so_far", 0.0) + spent,
        }


class Spent(NamedTuple):
    """The FLOP, sampled tokens and seconds of a run up to a moment, without its evaluations."""

    flop: float
    tokens: float
    seconds: float


def spent(rows: Sequence[Mapping[str, float]]) -> list[Spent]:
    """Return what the run had spent after each of the ``rows`` of its metrics, the first of which is row 0."""
    total, after = Spent(0.0, 0.0, 0.0), []
    for row in rows:
        seconds = row.get("timing_s/step", 0.0) - row.get("timing_s/eval", 0.0) if row["step"] else 0.0
        tokens = total.tokens + row.get("rollout/sampled_tokens", 0.0)
        total = Spent(row.get("perf/flop_so_far", total.flop), tokens, total.seconds + seconds)
        after.append(total)
    return after


def of_targets(
    targets: Sequence[float], rows: Sequence[Mapping[str, float]], note: Callable[[str], object], *, ended: bool
) -> dict[str, float]:
    """Return the metrics of the ``targets`` that were reached and held, and tell of those that the last row reached
    first; arguments as for `reached`."""
    metrics: dict[str, float] = {}
    for target in targets:
        if (then := reached(rows, target, ended=ended)) is not None:
            name = f"eval/target/{target:g}"
            metrics |= {f"{name}/{unit}": value for unit, value in then._asdict().items()}
            if not any(f"{name}/flop" in row for row in rows):
                note(
                    f"{100 * target:g} % of the held-out problems took {then.flop:.3g} FLOP, {then.tokens:.0f} sampled "
                    f"tokens and {then.seconds:.1f} s."
                )
    return metrics


def reached(rows: Sequence[Mapping[str, float]], target: float, *, ended: bool) -> Spent | None:
    """Return what the run had spent when it reached the accuracy ``target`` and held it; None if it has not.

    Args:
        rows: of the run's metrics from row 0 on.
        ended: see `crossing`.
    """
    after = zip(spent(rows), rows, strict=True)
    readings = [
        (then, row["eval/accuracy"]) for then, row in after if math.isfinite(row.get("eval/accuracy", math.nan))
    ]
    return crossing(readings, target, ended=ended)


def crossing(readings: Sequence[tuple[Spent, float]], target: float, *, ended: bool) -> Spent | None:
    """Return what was spent when the accuracies of ``readings`` crossed ``target``; None if they have not.

    Accuracy is taken to be linear between two evaluations. A crossing counts if the next evaluation is at most `FELL`
    below the target.

    Args:
        ended: no further evaluation comes, so that a crossing of the last one counts.
    """
    for i, (now, accuracy) in enumerate(readings):
        after = readings[i + 1][1] if i + 1 < len(readings) else target if ended else -math.inf
        if accuracy < target or after < target - FELL:
            continue
        if i == 0:
            return now
        before, low = readings[i - 1]
        share = (target - low) / (accuracy - low) if accuracy > low else 1.0
        share = min(max(share, 0.0), 1.0)  # after a crossing that did not hold, the reading before may be above
        return Spent(*(a + share * (b - a) for a, b in zip(before, now, strict=True)))
    return None
