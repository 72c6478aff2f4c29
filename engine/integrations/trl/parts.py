"""The parts that `accelerate` enabled, and the options of the trainer by which each is used or left to TRL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from rolltree.kernels import Objective

from ...model.pictures import placeholder
from ...rollout import SamplingParams
from . import pictures
from .checks import base_model, log
from .objective import objective
from .packing import Batch, packed, padded
from .replaced import BEHAVIOUR, COMPLETIONS, LOSS, ORDER, SCORES, Part, own
from .rollouts import Rollouts, sampling_params


@dataclass
class Parts:
    """The parts that `accelerate` enabled.

    Callbacks and subclasses may change a trainer's options and methods at any time, so they are read at each use.
    """

    head: bool
    tree: bool
    engine: Rollouts | None
    models: list[PreTrainedModel]  # those that were prepared
    recurrent: bool = False  # the models have recurrent layers
    attention: str = ""  # of the models before `accelerate`
    objective: Objective | None = None  # of the last loss; None: the loss is TRL's code
    rollouts: Rollouts | None = None  # of the last completions; None: they are TRL's
    grouped: bool = False  # the buffered micro-batches are in groups
    scores: tuple[Tensor, Tensor] | None = None  # log-probs and entropies [B, C] that were computed with the loss
    said: set[str] = field(default_factory=set)

    def say(self, message: str) -> None:
        """Log a warning, once."""
        if message not in self.said:
            self.said.add(message)
            log.warning("%s", message)

    def leave(self, part: Part, why: object) -> None:
        """Log that ``part`` stays TRL's."""
        self.say(part.warning % str(why).rstrip("."))

    def stays(self, trainer: Any, part: Part) -> bool:
        """Return True, and log the reason, if ``part`` stays TRL's because of a method of the user's."""
        why = own(trainer, part)
        if why is not None:
            self.leave(part, why)
        return why is not None

    def prepared(self, model: Any, trainer: Any) -> bool:
        """Return True if `accelerate` prepared ``model``, which may be wrapped; log it if not."""
        inner = base_model(trainer.accelerator.unwrap_model(model, keep_torch_compile=False))
        prepared = any(inner is one for one in self.models)
        if not prepared:
            self.leave(SCORES, "the trainer was given another model after accelerate")
        return prepared

    def loss(self, trainer: Any) -> Objective | None:
        """Return the trainer's loss as an objective; None, after a warning, if it stays TRL's code."""
        self.objective = None
        if self.head:
            try:
                self.objective = objective(trainer)
            except ValueError as why:
                self.leave(LOSS, why)
        return self.objective

    def sampling(self, trainer: Any) -> SamplingParams | None:
        """Return how the native engine samples; None, after a warning, if the completions stay TRL's."""
        self.rollouts = None
        if self.engine is None:
            return None
        try:
            params = sampling_params(trainer)
        except (ValueError, TypeError) as why:
            self.leave(COMPLETIONS, why)
            return None
        self.rollouts = self.engine
        return params

    def read(self, trainer: Any) -> None:
        """Read all options, so that the warnings come before the training."""
        self.loss(trainer)
        if self.head:
            self.stays(trainer, SCORES)
        if self.tree:
            self.stays(trainer, ORDER)
        if self.sampling(trainer) is not None and self.engine is not None and self.engine.with_logprobs:
            self.stays(trainer, BEHAVIOUR)

    @contextmanager
    def own_attention(self) -> Iterator[None]:
        """Give the trained model the attention that it had before `accelerate`."""
        model = self.models[0]
        now = model.config._attn_implementation
        model.set_attn_implementation(self.attention)
        try:
            yield
        finally:
            model.set_attn_implementation(now)

    def batch(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, completion: int, fields: dict[str, Any]
    ) -> Batch:
        """Return the model's inputs for samples; ``fields`` are those of their pictures."""
        if not self.tree:
            for_model = {name: values for name, values in fields.items() if name != "num_images"}
            return padded(input_ids, attention_mask, completion, for_model)
        picture_options: dict[str, Any] = {}
        if "pixel_values" in fields:
            unwrapped = base_model(model)
            picture_options = {
                "pictures": pictures.pictures_of(unwrapped, fields),
                "placeholder": placeholder(unwrapped),
            }
        return packed(input_ids, attention_mask, completion, recurrent=self.recurrent, **picture_options)
