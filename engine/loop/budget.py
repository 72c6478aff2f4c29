"""The number of groups that may be open at once, such that none is too old when it is trained.

**Lag.** A step takes ``batch`` groups and ends with the weights they made. ``steps`` counts the steps that have ended.
A group is admitted at ``started = steps`` and trained at ``steps``: its lag is ``steps - started``, so the time it
waited in any queue counts, and no token of it was sampled by weights older than those of ``started``.

**Rules.** With S the staleness, P the batch and W the window:

1. A group is admitted only while fewer than ``capacity = (S + 1) P - W`` are open, that is admitted and neither trained
   to the end of their step nor dropped.
2. A batch takes ready groups, the oldest first, and passes over one that is not ready only while fewer than W younger
   ones have been taken before it in total.

**Bound.** The lag of every group that is trained is at most S. Let g be admitted at ``started = v``, and trained in a
step that begins when ``steps = k``. By then k P groups had been trained. Of these v P were trained when g was admitted;
each of the others was open then, or is younger than g. By rule 1 fewer than ``(S + 1) P - W`` others were open, and by
rule 2 at most W younger ones were taken before g. So ``k P < v P + (S + 1) P - W + W``, hence ``k < v + S + 1``. Groups
that are dropped only make the counts smaller.

**Shares.** Sources keep their shares of the trained groups although their groups take unequal time: every group that
is not dropped is trained, and of the first n admitted only those still open have not been.

**Worked example.** S = 1, P = 4, window 0.5: W = 2, so 6 groups are open, 0 to 5. Group 3 is long. Step 1 takes 0, 1,
2 and 4, which overtakes 3. As it ends, 6 to 9 are admitted with ``started = 1``. 5, 6 and 7 are ready next, but only
one more may overtake 3, so step 2 waits for it, begins at ``steps = 1`` and trains 3, 5, 6, 7: group 3 has lag 1 = S.
Without rule 2 it might have waited for ever.

At S = 0 groups are admitted at the beginning of a step, and whenever so many were dropped that fewer than P are open:
``over_sampling`` for each one that the batch will lack. The batch is taken when all open groups are ready, so that it
does not depend on which was faster: the oldest P, and the surplus is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass


class StalenessError(AssertionError):
    """The bound was violated, by a defect of this package and not of a configuration."""


@dataclass(frozen=True)
class Budget:
    """The parameters of the rules above.

    Args:
        batch: number of groups trained in a step, P.
        staleness: maximum lag in steps, S.
        window: share of the S P groups beyond a batch that may overtake one that is not ready.
        over_sampling: number of groups admitted at S = 0 for each one that the batch lacks.
    """

    batch: int
    staleness: int = 0
    window: float = 0.0
    over_sampling: float = 1.0

    @property
    def overtaking(self) -> int:
        """Number of younger groups that may be trained before an older one, W."""
        return int(self.window * self.staleness * self.batch)

    @property
    def capacity(self) -> int:
        """Maximum number of groups open at once."""
        if self.staleness == 0:
            return self.lacking(0)
        return (self.staleness + 1) * self.batch - self.overtaking

    def lacking(self, there: int) -> int:
        """Return the number of groups to admit at S = 0 if ``there`` ones are open."""
        lacking = max(0, self.batch - there)
        return max(lacking, round(self.over_sampling * lacking))

    def check(self, ticket: int, started: int, steps: int) -> int:
        """Return the lag of a group that is about to be trained.

        Raises:
            StalenessError: the lag exceeds the staleness.
        """
        lag = steps - started
        if lag > self.staleness:
            raise StalenessError(
                f"Group {ticket} was admitted after {started} steps and would be trained after {steps}, a lag above "
                f"loop.staleness = {self.staleness}; this is a mistake in rolltree, please report it."
            )
        return lag
