"""Independent responses of one group that are sampled in different ways: at several temperatures, or one greedily."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..data.segment import LeafStatus
from .program import Action, GroupState, Rewind, RolloutProgram, SegmentReport


class ManyTemperatures(RolloutProgram):
    """Multi-temperature sampling: the first response has the run's temperature, the k-th further one the k-th of
    ``temperatures``, from the first again after the last. Each is trained at the temperature that it was sampled at.
    The others begin when the first has ended.

    Args:
        temperatures: of the other responses (defaults inferred).

    Raises:
        ValueError: there is none, or one is not positive.
    """

    rewinds = True

    def __init__(self, temperatures: Sequence[float] = (0.6, 0.8, 1.0, 1.2)) -> None:
        if not temperatures or min(temperatures) <= 0:
            raise ValueError("many_temperatures needs temperatures above 0.")
        self.temperatures = tuple(temperatures)

    def start(self, group: GroupState) -> int:
        return 1

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        if _first_ended(finished):
            for k in range(group.width - 1):
                yield Rewind((0,), 0, 1, temperature=self.temperatures[k % len(self.temperatures)])


class GreedyBaseline(RolloutProgram):
    """ReMax (Li et al. 2023, arXiv 2310.10505): n - 1 independent responses, and a greedy one that is not trained on,
    whose reward is the baseline of the advantage `remax`.

    Args:
        temperature: of the greedy response, so low that the likeliest token is drawn (inferred).

    Raises:
        ValueError: the temperature is not positive.
    """

    rewinds = True

    def __init__(self, temperature: float = 1e-3) -> None:
        if temperature <= 0:
            raise ValueError("greedy_baseline needs a temperature above 0.")
        self.temperature = temperature

    def start(self, group: GroupState) -> int:
        if group.width < 2:
            raise ValueError(f"greedy_baseline needs n of at least 2, got {group.width}.")
        return group.width - 1

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        if _first_ended(finished):
            yield Rewind((0,), 0, 1, temperature=self.temperature, train=False)


def _first_ended(finished: Sequence[SegmentReport]) -> bool:
    """Return True once: when the first response has ended, unless it failed."""
    return any(s.branch == (0,) and s.status not in (None, LeafStatus.FAILED) for s in finished)
