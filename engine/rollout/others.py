"""Branches that another policy samples: each is a request of that policy's engine, whose prompt is the path so far.

The engine of the run's own policy steers the program and holds the tree. When a role changes hands (`Fork.role`), its
branch waits, the other engine samples the next segment, and `Steering` appends these tokens as a node of the branch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..data.columns import Array
from ..programs import Action, BranchId, Finish, GroupState, RolloutProgram, SegmentReport
from .branch import Branch, Request
from .engine import RolloutEngine
from .growing import Sampled
from .records import child_seed, join
from .sampler import FLOP

SEGMENTS = 1 << 32
"""Indices of seeds from here on are those of other policies' segments; no branch has as many children."""


class OneSegment(RolloutProgram):
    """Ends each branch after one segment like those of another program."""

    independent = True

    def __init__(self, like: RolloutProgram) -> None:
        self.segment_stop, self.segment_stop_token_ids = like.segment_stop, like.segment_stop_token_ids
        self.top_logprobs, self.needs_entropies = like.top_logprobs, like.needs_entropies
        self.reports: dict[BranchId, SegmentReport] = {}

    def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
        for segment in finished:
            self.reports[segment.branch] = segment
            if segment.status is None:
                yield Finish(segment.branch)


@dataclass(frozen=True)
class Player:
    """A further policy.

    Attributes:
        number: its place among the run's policies, from 1 on; the column `model` of its tokens.
        roles: the roles that it plays.
    """

    number: int
    engine: RolloutEngine
    roles: Sequence[str]


class Others:
    """The further policies of a run, by name, and the branches that they sample at present."""

    def __init__(self, players: Mapping[str, Player]) -> None:
        self._player = {role: player for player in players.values() for role in player.roles}
        self._waiting: dict[Branch, tuple[Player, Request]] = {}
        self.flop: Counter[str] = Counter()
        """FLOP of the further policies' engines that were not added to the counts of the first one's (`Counters`)."""

    def plays(self, branch: Branch) -> bool:
        """Return whether another policy plays the role of ``branch``."""
        roles = branch.request.program.roles
        return bool(roles) and roles[branch.role] in self._player

    def ask(self, branch: Branch, path: Array, length: int) -> None:
        """Let the policy of the branch's role sample its next segment, as `Branch.away` says.

        Args:
            path: [prompt + response] int32, all tokens of the branch.
            length: response tokens so far.

        Raises:
            ValueError: the policy's engine cannot serve the request.
        """
        assert branch.away is not None
        request, (n, end) = branch.request, branch.away
        player = self._player[request.program.roles[branch.role]]
        params = replace(request.params, n=n, max_new_tokens=end - length, temperature=branch.temperature)
        seed = int(child_seed(branch.seed, SEGMENTS + length))
        (submitted,) = player.engine.submit([path.tolist()], params, OneSegment(request.program), seeds=[seed])
        submitted.held_out = request.held_out
        self._waiting[branch] = player, submitted

    def step(self) -> list[tuple[Branch, int, list[Sampled] | Exception]]:
        """Compute a step of every engine that has work; return the branches whose segments have ended.

        Returns:
            Each branch with the policy's number and a `Sampled` for each branch that it becomes, or the error.
        """
        for engine in {id(player.engine): player.engine for player, _ in self._waiting.values()}.values():
            before = engine.loop.counts.copy()
            engine.step()
            self.flop.update({name: engine.loop.counts[name] - before[name] for name in FLOP})
        done = [branch for branch, (_, request) in self._waiting.items() if request.done]
        samples: list[tuple[Branch, int, list[Sampled] | Exception]] = []
        for branch in done:
            player, request = self._waiting.pop(branch)
            samples.append((branch, player.number, _sampled(request) if request.error is None else request.error))
        return samples

    def drop(self, branches: Iterable[Branch]) -> None:
        """Stop sampling those of ``branches`` that another policy samples."""
        for branch in branches:
            if branch in self._waiting:
                player, request = self._waiting.pop(branch)
                player.engine.abort([request])


def _sampled(request: Request) -> list[Sampled]:
    program = request.program
    assert isinstance(program, OneSegment)
    samples = []
    for key in sorted(request.leaves):
        records = join([node.records for node in request.leaves[key].node.path() if node.parent is not None][::-1])
        report = program.reports[key]
        samples.append(Sampled(records, report.status, report.stop, request.errors.get(key)))
    return samples
