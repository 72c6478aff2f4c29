"""The baseline of the rollout benchmark."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rolltree.bench.runs import rollout
from rolltree.bench.runs.rollout import SampledLogprobs

CPU = torch.device("cpu")


def test_logprobs_of_each_step_are_those_of_kept_scores() -> None:
    model: Any = rollout.make_model(CPU, small=True)
    ids = torch.arange(12).view(3, 4)
    given = {"attention_mask": torch.ones_like(ids), "do_sample": True, "top_k": 0, "max_new_tokens": 5}
    noted = SampledLogprobs()
    out = model.generate(
        ids, **given, logits_processor=[noted], output_scores=True, return_dict_in_generate=True, pad_token_id=0
    )
    noted.note(out.sequences[:, -1])
    expected: Tensor = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    torch.testing.assert_close(torch.stack(noted.steps, 1), expected, rtol=1e-6, atol=1e-6)


def test_the_baseline_keeps_no_step_of_scores() -> None:
    """256 responses of 512 tokens and a vocabulary of 151,936 would be 80 GB of them."""
    case = next(iter(rollout.cases(CPU, quick=True)))
    inputs = case.make()
    asked: list[Any] = []
    generate = inputs.model.generate

    def watched(*args: Any, **options: Any) -> Any:
        asked.append(options["generation_config"])
        return generate(*args, **options)

    inputs.model.generate = watched
    rollout.transformers_generate(inputs)["generate"]()
    assert [config.output_scores for config in asked] in ([False], [None])
