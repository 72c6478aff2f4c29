"""Rates of devices for simulations: the arithmetic of a GPU, or what a run has measured, with lengths of responses."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from ..errors import UserError
from ..settings import TrainConfig
from .modelled import GEMM_SHARE, HOST, MEMORY, MFU, STREAM_SHARE, DeviceModel, MeasuredRates, Shape, Times
from .sizes import BYTES, ModelSizes
from .virtual import Lengths

TO_STORE, NETWORK = 10e9, 12.5e9
"""Bytes/s at which weights come from a GPU into the object store, and go from node to node; assumptions."""
NODE = 8
"""GPUs of a node; an assumption."""
MEDIAN = 1 / 8
"""Median length of a response as a share of `rollout.max_new_tokens`; an assumption."""
ROWS = 20
"""Most rows of metrics.jsonl, the newest, from which rates are read."""
UPDATE = ("pack", "old_log_prob", "forward_backward", "head", "optimizer", "update_critic")
"""Parts of ``timing_s`` that belong to an update."""


@dataclass(frozen=True)
class Rates:
    """The rates of devices that the simulations use, and their origin.

    Attributes:
        source: sentence about the origin.
        assumptions: sentences about what is assumed.
        engine: seconds of an engine's steps.
        trainer: seconds of updates.
        lengths: lengths of responses.
        mean_length: their mean, in tokens.
        prompt: tokens of a prompt.
        publish_s: seconds for which new weights keep the trainer busy, by the number of ranks.
        load_s: seconds in which engines fetch them, by the numbers of engines and ranks.
        judge_s: seconds of a verdict.
    """

    source: str
    assumptions: Sequence[str]
    engine: Times
    trainer: Times
    lengths: Lengths
    mean_length: float
    prompt: int
    publish_s: Callable[[int], float]
    load_s: Callable[[int, int], float]
    judge_s: float


def scoring_roles(config: TrainConfig) -> int:
    """Return the number of other models that score rollouts."""
    roles = config.roles
    served = sum(teacher.url is not None for teacher in roles.all_teachers.values())
    return sum(map(roles.has, ("reference", "critic"))) + len(roles.all_teachers) - served


# -- rates of the hardware model --------------------------------------------------------------------------------------


def modelled(config: TrainConfig, sizes: ModelSizes, device: str) -> Rates:
    """Return rates by the arithmetic of a GPU.

    Raises:
        UserError: the model is not one that the arithmetic knows.
    """
    if sizes.unlike:
        raise UserError(
            f"The hardware model knows plain dense decoders, and '{config.model.path}' has {sizes.unlike}; give "
            "--rates with the directory of a run."
        )
    if config.model.dtype != "bfloat16":
        raise UserError(
            f"The hardware model is of bfloat16, and model.dtype is '{config.model.dtype}'; add --model.dtype bfloat16 "
            "or --rates with the directory of a run."
        )
    shape = Shape(sizes.parameters, sizes.layers, sizes.heads, sizes.key_heads, sizes.dim)
    prompt, longest = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    times = DeviceModel(shape, MEMORY[device], prompt)
    roles = scoring_roles(config)
    weights = sizes.parameters * BYTES[config.model.dtype]
    median = max(1.0, MEDIAN * longest)

    @cache
    def lengths(seed: int, n: int) -> Sequence[int]:
        drawn = np.random.default_rng(seed % 2**63).lognormal(math.log(median), 1.0, n)
        cut: list[int] = np.clip(np.ceil(drawn), 1, longest).astype(int).tolist()
        return cut

    return Rates(
        source=f"the arithmetic of an {device} by its data sheet; nothing was run on one.",
        assumptions=(
            f"Decode steps reach {100 * STREAM_SHARE:.0f} % of its memory's rate and {100 * GEMM_SHARE:.0f} % of its "
            f"FLOP/s, and {1e6 * HOST:.0f} us more; updates {100 * MFU:.0f} % (assumed).",
            f"Lengths are log-normal with sigma 1 and median {median:.0f}, cut at {longest} tokens (assumed); prompts "
            f"have {prompt} tokens (data.max_prompt_tokens).",
            f"Each rank stores its part of the weights at {TO_STORE / 1e9:g} GB/s, and they go between nodes of {NODE} "
            f"GPUs at {NETWORK / 1e9:g} GB/s (assumed); verdicts take no time (assumed).",
        ),
        engine=times,
        trainer=Scored(times, roles, config.trainer.epochs),
        lengths=lengths,
        mean_length=float(np.mean([length for seed in range(500) for length in lengths(seed, config.rollout.n)])),
        prompt=prompt,
        publish_s=lambda ranks: weights / ranks / TO_STORE,
        load_s=lambda engines, ranks: broadcast_s(weights, engines, ranks),
        judge_s=0.0,
    )


@dataclass(frozen=True)
class Scored:
    """`Times` of updates that pass over a batch several times, after other models have scored it: each a forward pass,
    a third of a pass of an update."""

    times: Times
    models: int
    epochs: int

    def steps(self, load: Any, count: int) -> float:
        """See `Times.steps`."""
        return self.times.steps(load, count)

    def update(self, groups: Sequence[Sequence[int]]) -> float:
        """See `Times.update`."""
        return self.times.update(groups) * (self.epochs + self.models / 3)


def broadcast_s(size: float, engines: int, ranks: int) -> float:
    """Return the seconds in which ``size`` bytes, of which each rank has a part, reach all engines: every node receives
    and sends at one rate, and nodes that have them pass them on to others."""
    return size / NETWORK * math.ceil(math.log2(1 + math.ceil(engines / NODE) / math.ceil(ranks / NODE)))


# -- rates of a run ---------------------------------------------------------------------------------------------------


def measured(config: TrainConfig, run: Path) -> Rates:
    """Return the rates that a run has measured, from the newest rows of its metrics.

    Raises:
        UserError: the directory lacks something.
    """
    rows, run_settings = _metrics(run), _their_settings(run)
    total = {name: math.fsum(row[name] for row in rows) for name in rows[0]}
    decoding = total["perf/sampling_s"] - total["perf/idle/tools"]
    full = 1 - total["perf/idle/tail"] / decoding if decoding > 0 else 0.0
    sampled = total["rollout/sampled_tokens"]
    if full <= 0 or sampled <= 0:
        raise UserError(f"'{run}/metrics.jsonl' has no decode steps in its newest rows; give a run that has sampled.")
    steps = sampled / (full * run_settings["max_batch_rows"])
    tokens = math.fsum(row["perf/throughput"] * row["timing_s/step"] for row in rows)
    update = math.fsum(total[f"timing_s/{part}"] for part in UPDATE)
    groups, prompt = _recorded(run)
    lengths = _cycled(groups)
    responses = run_settings["prompts_per_step"] * run_settings["n"] * len(rows)
    passes = config.trainer.epochs / run_settings["epochs"]
    rates = MeasuredRates(decoding / steps, update * run_settings["ranks"] / tokens * passes, prompt)
    sync = total["timing_s/sync"] / len(rows)

    return Rates(
        source=f"rates that the run '{run}' measured in {len(rows)} steps, for devices like its own.",
        assumptions=(
            f"A decode step takes {1e3 * rates.step_s:.3g} ms whatever its rows, an update "
            f"{1e6 * rates.token_s:.3g} us a token on one device, divided by the ranks (assumed).",
            f"Lengths are those of {len(groups)} groups of that run; its prompts have {prompt} tokens on average.",
            f"New weights take {sync:.3g} s, whatever the numbers of engines and ranks (assumed).",
        ),
        engine=rates,
        trainer=rates,
        lengths=lengths,
        mean_length=float(np.mean([length for group in groups for length in group])),
        prompt=prompt,
        publish_s=lambda ranks: sync,
        load_s=lambda engines, ranks: 0.0,
        judge_s=total["timing_s/reward"] * run_settings["workers"] / responses,
    )


def _metrics(run: Path) -> list[Mapping[str, float]]:
    """Return the newest rows of a run's metrics with the values that are needed."""
    file = run / "metrics.jsonl"
    if not file.is_file():
        raise UserError(f"'{run}' has no metrics.jsonl; give --rates the directory of a run.")
    try:
        read = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        rows = [row for row in read if row["step"] > 0][-ROWS:]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"'{file}' is not a run's metrics: {error}.") from error
    if not rows:
        raise UserError(f"'{file}' has no step yet; give --rates a run that has trained.")
    needed = [
        "perf/sampling_s", "perf/idle/tools", "perf/idle/tail", "rollout/sampled_tokens", "perf/throughput",
        "timing_s/step", "timing_s/sync", "timing_s/reward", *(f"timing_s/{part}" for part in UPDATE),
    ]  # fmt: skip
    for row in rows:
        if missing := [name for name in needed if not isinstance(row.get(name), int | float)]:
            raise UserError(f"Step {row['step']} of '{file}' lacks {missing[0]}; record the run with this version.")
    return [{name: float(row[name]) for name in needed} for row in rows]


def _their_settings(run: Path) -> dict[str, int]:
    """Return the keys of a run's configuration that its rates depend on."""
    file = run / "config.toml"
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
        return {
            "n": document["rollout"]["n"],
            "max_batch_rows": document["rollout"]["max_batch_rows"],
            "prompts_per_step": document["trainer"]["prompts_per_step"],
            "ranks": document["trainer"]["ranks"],
            "epochs": document["trainer"].get("epochs", 1),
            "workers": document["reward"]["workers"],
        }
    except (OSError, ValueError) as error:
        raise UserError(f"'{file}' cannot be read; give --rates the directory of a run.") from error
    except KeyError as error:
        raise UserError(f"'{file}' lacks {error}; record the run with this version.") from error


def recorded_lengths(run: Path) -> tuple[Lengths, int]:
    """Return the lengths of a run's responses, a recorded group for each seed, and its prompts' mean length.

    Raises:
        UserError: the run has recorded none.
    """
    groups, prompt = _recorded(run)
    return _cycled(groups), prompt


def _cycled(groups: Sequence[Sequence[int]]) -> Lengths:
    def lengths(seed: int, n: int) -> Sequence[int]:
        group = groups[seed % len(groups)]
        return [group[i % len(group)] for i in range(n)]

    return lengths


def _recorded(run: Path) -> tuple[list[list[int]], int]:
    """Return the lengths of the responses of each recorded group, and the mean length of the prompts."""
    files = sorted((run / "rollouts").glob("step_*.parquet"))[-ROWS:]
    if not files:
        raise UserError(f"'{run}' has no rollouts/step_*.parquet, whose lengths --rates needs.")
    groups: dict[tuple[int, int], list[int]] = {}
    prompts = []
    for number, file in enumerate(files):
        table = pq.read_table(file, columns=["group", "prompt_ids", "response_ids"]).to_pydict()
        for ticket, prompt, response in zip(*table.values(), strict=True):
            groups.setdefault((number, ticket), []).append(max(1, len(response)))
            prompts.append(len(prompt))
    return list(groups.values()), round(float(np.mean(prompts)))
