"""A store of trained groups on disk, of which a share is trained on again: `[replay]`.

Each group is one file in the run's directory, in the format of `write_groups`, as it was judged: token ids, old
log-probs and policy versions, rewards before shaping. Only an index of them is in memory and in checkpoints, so the
store may be larger than both. A file is deleted when neither the newest checkpoint nor the one before names it.

Groups of other runs come from files of `write_groups` or of `write_rollouts`. These are read when the run starts, and
their groups stay in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..data.episodes import Episodes
from ..data.paths import path_credit
from ..data.store import read_rollouts
from ..data.tree import TokenTree
from ..errors import UserError
from ..prompts.group import Group, Responses, State
from ..prompts.prompts import Prompt
from ..settings import ReplayConfig
from .replay import Recorded, read_groups, write_groups

DRAWN = 0x5E91A
"""Part of the seed of the draws."""
FOREIGN = -1
"""Policy version of tokens that another run's policy sampled."""


@dataclass(frozen=True)
class Stored:
    """A group in the store."""

    file: str
    index: int
    """Number of the group in its file."""
    step: int
    """The step that trained it first; 0: another run's."""
    score: float
    """Mean of the absolute credit of its tokens when it was stored."""
    digest: str
    """BLAKE2b hash of the file, 32 hex digits."""


class ReplayStore:
    """Holds groups and draws some of them for each step; the draws follow from the seed and the step alone.

    Args:
        directory: of the store's files.
        keep: returns True for a trained group that enters the store.
        rescored: old log-probs are computed before the update, so that groups without them can be used.

    Raises:
        UserError: a file of `replay.paths` cannot be used.
    """

    def __init__(
        self,
        config: ReplayConfig,
        directory: Path,
        seed: int,
        keep: Callable[[TokenTree], Any],
        tokenizer: PreTrainedTokenizerBase,
        *,
        count: int,
        rescored: bool = False,
    ) -> None:
        self.config, self.directory, self._seed, self._keep, self._count = config, directory, seed, keep, count
        self.stored: list[Stored] = []
        self._doomed: list[str] = []  # files that left the store since the last checkpoint
        self._deletable: list[str] = []  # files that the last checkpoint does not name either
        self._foreign: dict[str, list[tuple[Prompt | None, TokenTree]]] = {}  # groups of `replay.paths`, by file
        for path in config.paths:
            self._foreign[path] = groups = _foreign(Path(path), tokenizer, rescored)
            digest = _digest(Path(path))
            self.stored += [Stored(path, i, 0, 1.0, digest) for i in range(len(groups))]
        if len(self.stored) > config.groups:
            raise UserError(
                f"The files of replay.paths hold {len(self.stored)} groups, and the store takes replay.groups = "
                f"{config.groups}; raise it, or name fewer files."
            )
        self._digests = {one.file: one.digest for one in self.stored}

    def snapshot(self, groups: Sequence[Group]) -> list[Recorded]:
        """Return copies of judged groups as they are before an update."""
        copies: list[Recorded] = []
        for group in groups:
            tree = group.tree
            copied = _copy(tree)
            del copied.meta["entry"], copied.meta["problem"]  # the prompt has them
            copied.meta.pop("scored", None)  # another run may have another reference
            copies.append((group.prompt, [Responses(copied, list(group.texts), {})]))
        return copies

    def add(self, recorded: Sequence[Recorded], trees: Sequence[TokenTree], step: int) -> None:
        """Store those of the groups of ``step`` that `replay.keep` chooses; the oldest leave a store that is full.

        Args:
            recorded: the groups before the update.
            trees: the same with their credit.
        """
        for (prompt, parts), tree in zip(recorded, trees, strict=True):
            if not np.isfinite(tree.rewards["reward"]).all() or not self._keep(Episodes(tree).tree):
                continue
            name = f"{int(tree.group[0]):09d}.safetensors"
            path, temporary = self.directory / name, self.directory / f"{name}.tmp"
            write_groups(temporary, [(prompt, parts)])
            temporary.replace(path)
            credit = np.abs(path_credit(tree))
            score = float(credit.mean()) if len(credit) else 0.0
            self.stored.append(Stored(name, 0, step, score, _digest(path)))
        self._leave([one for one in self.stored if not self._is_young(one, step + 1)])
        self._leave(self.stored[: max(len(self.stored) - self.config.groups, 0)])

    def draw(self, step: int) -> list[TokenTree]:
        """Return groups to train on again in ``step``, as many as `replay.share` says if the store has them.

        Raises:
            UserError: a file is missing or has changed.
        """
        young = [one for one in self.stored if self._is_young(one, step)]
        count = min(self._count, len(young))
        if not count:
            return []
        weight = np.array([one.score for one in young]) ** self.config.prefer
        weight = weight if np.count_nonzero(weight) >= count else np.ones(len(young))
        rng = np.random.default_rng([self._seed, step, DRAWN])
        chosen = rng.choice(len(young), count, replace=False, p=weight / weight.sum())
        return [self._read(young[i]) for i in sorted(chosen.tolist())]

    def state_dict(self) -> dict[str, Any]:
        """Return the index, and delete files that neither this nor the checkpoint before names."""
        for name in self._deletable:
            (self.directory / name).unlink(missing_ok=True)
        self._deletable, self._doomed = self._doomed, []
        return {"stored": [asdict(one) for one in self.stored], "left": list(self._deletable)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`.

        Raises:
            UserError: a file of `replay.paths` has changed.
        """
        self.stored = [Stored(**one) for one in state["stored"]]
        for one in self.stored:
            if not one.step and self._digests.get(one.file) != one.digest:
                raise UserError(f"The file '{one.file}' (replay.paths) has changed; restore it, or start a new run.")
        self._deletable, self._doomed = list(state["left"]), []

    def _is_young(self, one: Stored, step: int) -> bool:
        return self.config.age is None or step - one.step <= self.config.age

    def _leave(self, gone: Sequence[Stored]) -> None:
        left = set(gone)
        self._doomed += [one.file for one in gone if one.step]
        self.stored = [one for one in self.stored if one not in left]

    def _read(self, one: Stored) -> TokenTree:
        if one.step:
            path = self.directory / one.file
            if not path.is_file() or _digest(path) != one.digest:
                what = "has changed" if path.is_file() else "is missing"
                raise UserError(f"The file '{path}' of the replay store {what}; restore it, or start a new run.")
            ((prompt, tree),) = _groups(path)
        else:
            prompt, tree = self._foreign[one.file][one.index]
            tree = _copy(tree)
            tree.set("policy_version", np.where(tree.loss_mask, FOREIGN, tree.policy_version))
        entry = {} if prompt is None else {"entry": prompt.entry, "problem": prompt.problem}
        tree.meta |= {"replayed": True, "replay_weight": self.config.weight} | entry
        return tree


def _groups(path: Path) -> list[tuple[Prompt | None, TokenTree]]:
    """Read the groups of a file.

    Raises:
        UserError: it holds none.
    """
    if path.suffix == ".parquet":
        return [(None, tree) for tree in read_rollouts(path)]
    recorded = [Group(i, prompt, 0, State.READY, parts=parts) for i, (prompt, parts) in enumerate(read_groups(path))]
    return [(group.prompt, group.tree) for group in recorded]


def _foreign(path: Path, tokenizer: PreTrainedTokenizerBase, rescored: bool) -> list[tuple[Prompt | None, TokenTree]]:
    """Read and check the groups of another run."""
    if not path.exists():
        raise UserError(f"There is no file '{path}' (replay.paths); name files of rollouts or of recorded groups.")
    groups = _groups(path)
    for _, tree in groups:
        if int(tree.token_id.max()) >= len(tokenizer):
            raise UserError(f"'{path}' (replay.paths) has ids outside of the vocabulary; it is of another tokenizer.")
        if "reward" not in tree.rewards or not np.isfinite(tree.rewards["reward"]).all():
            raise UserError(f"'{path}' (replay.paths) has responses without a reward; leave them out of the file.")
        if not rescored and np.isnan(tree.behaviour_logprob[tree.loss_mask]).any():
            raise UserError(
                f"'{path}' (replay.paths) has tokens without the log-prob of the policy that sampled them; set "
                'algorithm.old_logprob to "recompute".'
            )
    if not groups:
        raise UserError(f"'{path}' (replay.paths) holds no groups; leave it out.")
    return groups


def _copy(tree: TokenTree) -> TokenTree:
    """Return a tree with columns, rewards and metadata of its own, so that an update does not change ``tree``'s."""
    columns = {name: values.copy() for name, values in tree.columns.items()}
    rewards = {name: values.copy() for name, values in tree.rewards.items()}
    return replace(tree, columns=columns, rewards=rewards, meta=dict(tree.meta))


def _digest(path: Path) -> str:
    if path.is_dir():  # a step's rollouts of several ranks
        return hashlib.blake2b("".join(map(_digest, sorted(path.iterdir()))).encode()).hexdigest()[:32]
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]
