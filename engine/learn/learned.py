"""The state of a learner: what a checkpoint of it holds, and the policy as a directory of Hugging Face."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..data.columns import Array
from ..errors import UserError
from ..model.lora import base_digest, gathered_sum, has_lora, plain_copy, save_adapter
from ..model.sharding import gathered, joined, local, named_shards, placed
from ..parts.calling import call
from ..train import checkpoint
from ..train.checkpoint import Saved
from ..train.phases import Phases
from ..train.trainer import Trainer
from .learning import LearningParts


class Part(NamedTuple):
    """One rank's part of a tensor, as bytes.

    Attributes:
        size: of the whole tensor.
        shape: of this part.
        data: the part's bytes [n] uint8.
    """

    size: torch.Size
    shape: torch.Size
    dtype: torch.dtype
    data: Array


class RankState(NamedTuple):
    """The state of one rank, for another of the same number: parts of the tensors of `Learned.save`, and its state."""

    parts: dict[str, Part]
    state: dict[str, Any]


class Learned:
    """The models of a learner and their optimisers, saved and restored by any number of ranks.

    Args:
        phases: records which part of an update the device computes when.

    Attributes:
        metrics: of the last step, which schedules may read.
    """

    def __init__(self, parts: LearningParts, phases: Phases) -> None:
        self.parts, self.model, self.group = parts, parts.model, parts.group
        self.roles, self.critic = parts.roles, parts.critic
        self.metrics: dict[str, float] = {}
        self.trainer = Trainer(parts.model, parts.optimizer, phases, parts.group)
        self._parameters = named_shards(parts.model)
        self._base = base_digest(parts.model) if has_lora(parts.model) else None

    def save(self, directory: Path) -> Saved:
        """Write `state_dict` for a checkpoint; of several ranks each writes its part, and all must call it.

        The state holds the generators of numpy and Python, which are equal on all ranks.

        Raises:
            OSError: a file cannot be written.
        """
        tensors, state = self._with_generators()
        return Saved(checkpoint.write_tensors(directory, tensors, self.group), state)

    def _with_generators(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, state = self.state_dict()
        if self.group.count > 1:
            generators, state["generators"] = checkpoint.generator_state()
            tensors |= {f"{self._own}{name}": tensor for name, tensor in generators.items()}
        return tensors, state

    def load(self, directory: Path, state: dict[str, Any]) -> None:
        """Restore what `save` wrote with any number of ranks; all must call it.

        Raises:
            UserError: as for `load_state_dict`.
        """
        like = None if self.group.count == 1 else self._like
        self._restore(checkpoint.read_tensors(directory, like, self.group), state)

    def rank_state(self) -> RankState:
        """Return a copy of this rank's part of what `save` writes."""
        tensors, state = self._with_generators()
        return RankState({name: _part(tensor) for name, tensor in tensors.items()}, copy.deepcopy(state))

    def take(self, kept: RankState) -> None:
        """Restore the result of `rank_state` of a rank with this number, among as many."""
        self._restore({name: self._tensor(name, part) for name, part in kept.parts.items()}, copy.deepcopy(kept.state))

    def _tensor(self, name: str, part: Part) -> Tensor:
        ours = self._like(name, part.size)
        tensor = torch.from_numpy(part.data.copy()).view(part.dtype).reshape(part.shape)
        if not isinstance(ours, DTensor):
            return tensor
        mesh, placements = ours.device_mesh, ours.placements
        return DTensor.from_local(tensor.to(ours.device), mesh, placements, shape=ours.shape, stride=ours.stride())

    def _restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.load_state_dict(tensors, state)
        if self.group.count > 1 and (generators := _under(self._own, tensors)):
            checkpoint.restore_generators(generators, state["generators"])

    @property
    def _own(self) -> str:
        """Prefix of this rank's generators among the tensors of a checkpoint."""
        return f"rank.{self.group.rank}/"

    def _like(self, name: str, size: torch.Size) -> Tensor | None:
        """Return a tensor that is sharded as ``name`` in a checkpoint is to be; None for one that every rank has."""
        prefix, _, rest = name.rpartition("/")
        if prefix.startswith("role."):
            ours: Tensor | None = self._parameters.get(rest)
        else:
            trainer = self.critic.trainer if prefix == "critic" and self.critic is not None else self.trainer
            ours = trainer.like(rest)
        return ours if ours is not None and ours.shape == size else None

    def export(self, directory: Path) -> None:
        """Write the policy as a Hugging Face directory that plain transformers loads; of several ranks the first does,
        and all must call it.

        An adapter is merged into the weights there, and also written alone, as peft loads it, to ``adapter``. Weights
        that are extrapolated (`Trajectory`) are extended there, the adapter alone is not.

        Raises:
            UserError: there were too few updates to extrapolate from.
        """
        adapted, writes = has_lora(self.model), self.group.rank == 0
        if self.group.count == 1:
            (self._whole() if adapted else self.model).save_pretrained(directory)
        else:
            whole = (gathered_sum if adapted else gathered)(self.model, writes)
            if writes:
                self.model.save_pretrained(directory, state_dict=whole)
        if adapted:
            save_adapter(self.model, directory / "adapter", writes)
        self.group.gather(None)  # the directory is complete when any rank returns

    def _whole(self) -> PreTrainedModel:
        """Return a model without adapter that has the weights to export."""
        model, trajectory = plain_copy(self.model), self.parts.trajectory
        if trajectory is not None:
            try:
                extension = trajectory.extension(self.model)
            except ValueError as error:
                raise UserError(
                    f"model.lora.extrapolate: {error}; raise trainer.steps and continue with --resume."
                ) from error
            weights = dict(model.named_parameters())
            with torch.no_grad():
                for name, change in extension.items():
                    weights[f"{name}.weight"].add_(change.to(weights[f"{name}.weight"]))
        return model

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and counters of the optimisers of policy and critic, and of roles whose weights change."""
        tensors, counters = self.trainer.state_dict()
        seen = [role.seen for role in self.roles]
        state: dict[str, Any] = {"trainer": counters, "roles": seen, "metrics": self.metrics, "base": self._base}
        if self.critic is not None:
            critic_tensors, state["critic"] = self.critic.trainer.state_dict()
            tensors |= {f"critic/{name}": t for name, t in critic_tensors.items()}
        for role in self.roles:
            if role.weights is not None and (role.initial or role.reset_every or role.ema is not None):
                role_weights = {name: joined(w, self._parameters[name]) for name, w in role.weights.items()}
                tensors |= {f"role.{role.column}/{name}": t for name, t in role_weights.items()}
        if self.parts.trajectory is not None:
            tensors |= self.parts.trajectory.tensors()
        return tensors, state

    def load_state_dict(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`.

        Raises:
            UserError: the tensors belong to another model or to other roles, or to the adapter of other weights.
        """
        if state.get("base") != self._base:
            raise UserError(
                "The checkpoint's adapter was trained on other weights than the model has now; set model.path back to "
                "the model the run began with, or restore its files."
            )
        self.metrics = state["metrics"]
        self.trainer.load_state_dict({name: t for name, t in tensors.items() if "/" not in name}, state["trainer"])
        if self.critic is not None:
            self.critic.trainer.load_state_dict(_under("critic/", tensors), state["critic"])
        if self.parts.trajectory is not None:
            self.parts.trajectory.load(tensors)
        if len(state["roles"]) != len(self.roles):
            raise UserError("The checkpoint has other [roles] than the configuration; restore them to resume.")
        for role, seen in zip(self.roles, state["roles"], strict=True):
            role.seen = seen
            if role.weights is not None and (saved := _under(f"role.{role.column}/", tensors)):
                shards = {name: local(placed(part, self._parameters[name])) for name, part in saved.items()}
                role.weights = {name: shards[name].to(w.device, copy=True) for name, w in role.weights.items()}

    def states(self) -> dict[str, Any]:
        """Return the states of the functions that have one, by their keys.

        Raises:
            UserError: one of them failed.
        """
        return {key: call(key, part.state_dict) for key, part in self.parts.stateful.items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore the result of `states`; raises as that."""
        for key, part in self.parts.stateful.items():
            call(key, part.load_state_dict, states[key])


def _part(tensor: Tensor) -> Part:
    ours = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().to("cpu", copy=True).contiguous()
    return Part(tensor.shape, ours.shape, ours.dtype, ours.reshape(-1).view(torch.uint8).numpy())


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
