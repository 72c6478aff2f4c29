"""``rolltree plan``: what N GPUs would do with a configuration, layout by layout. Everything is simulated.

A layout splits the GPUs into ranks that train and engines that sample. Each is simulated with the loop of a real run
(`rolltree.engine.plan.simulate`). The seconds of decode steps and updates are either the arithmetic of a GPU
(`DeviceModel`), with lengths that are assumed, or what a run has measured (`measured`), with its lengths; then a GPU
stands for a device like those of that run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import UserError
from ..plan.modelled import CAPACITY
from ..plan.rates import Rates, measured, modelled, scoring_roles
from ..plan.simulate import Outcome, Scenario, look_s, simulate
from ..plan.sizes import BYTES, ModelSizes, read_sizes
from ..settings import TrainConfig
from .assembly.checks import check_lengths
from .assembly.sampling import budget

VLLM_SHARE = 0.9
"""vLLM's default of ``gpu_memory_utilization``."""


@dataclass(frozen=True)
class Layout:
    """A split of the GPUs, its memory and its simulated steady state.

    Attributes:
        ranks: GPUs that train.
        engines: GPUs that sample; 0: one GPU samples and trains in turn.
        trainer_gb: 1e9 bytes on each GPU that trains, without activations.
        engine_gb: 1e9 bytes on each GPU that samples, without activations.
        fits: both are below the GPU's memory; None if that is not known.
        outcome: of the simulation.
    """

    ranks: int
    engines: int
    trainer_gb: float
    engine_gb: float
    fits: bool | None
    outcome: Outcome

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.ranks + self.engines


@dataclass(frozen=True)
class Plan:
    """The layouts of a number of GPUs."""

    rates: Rates
    notes: Sequence[str]
    layouts: Sequence[Layout]

    def lines(self) -> Iterator[str]:
        """Yield a table, with what it rests on."""
        yield f"Simulated, not measured: {self.rates.source}"
        yield from (f"  {sentence}" for sentence in (*self.rates.assumptions, *self.notes))
        yield ""
        rows = [
            ["ranks", "engines", "step s", "tokens/s", "a GPU", "trainer waits", "engines idle", "lag", "trainer GB",
             "engine GB", ""]
        ]  # fmt: skip
        fitting = [layout for layout in self.layouts if layout.fits is not False]
        best = max(fitting, key=lambda layout: layout.outcome.tokens_s, default=None)
        for layout in self.layouts:
            outcome = layout.outcome
            verdict = "does not fit" if layout.fits is False else "most tokens/s" if layout is best else ""
            rows.append(
                [
                    str(layout.ranks),
                    str(layout.engines) if layout.engines else "the same GPU",
                    f"{outcome.step_s:.3g}",
                    f"{outcome.tokens_s:,.0f}",
                    f"{outcome.tokens_s / layout.gpus:,.0f}",
                    f"{100 * outcome.trainer_waits:.0f} %",
                    f"{100 * outcome.engines_idle:.0f} %",
                    f"{outcome.lag:.1f}, at most {outcome.max_lag}",
                    f"{layout.trainer_gb:.3g}",
                    f"{layout.engine_gb:.3g}",
                    verdict,
                ]
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        yield from (
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def as_json(self) -> str:
        """Return the same as JSON."""
        layouts = [
            {key: value for key, value in asdict(layout).items() if key != "outcome"} | layout.outcome.as_dict()
            for layout in self.layouts
        ]
        told = {"simulated": True, "source": self.rates.source, "assumptions": [*self.rates.assumptions, *self.notes]}
        return json.dumps(told | {"layouts": layouts}, indent=2)


def make_plan(config: TrainConfig, gpus: int, device: str = "H100", run: Path | None = None) -> Plan:
    """Simulate the layouts of ``gpus`` GPUs.

    Args:
        config: the configuration; its own `trainer.ranks` and `rollout.engines` are not used.
        gpus: number of GPUs.
        device: the GPU, if ``run`` is None: H100 or H200.
        run: directory of a run that has measured rates.

    Raises:
        UserError: something is missing that the plan needs, or is not modelled.
    """
    if config.models:
        raise UserError(
            f"A plan is for one policy, and the run trains `models.{next(iter(config.models))}` too; leave it out."
        )
    sizes = _sizes(config)
    check_lengths(config, sizes.positions)
    staleness = config.loop.staleness
    if gpus == 1 and staleness:
        raise UserError(
            "One GPU that samples while it trains is not modelled; set loop.staleness to 0, or plan for 2 GPUs or more."
        )
    rates = modelled(config, sizes, device) if run is None else measured(config, run)
    capacity = CAPACITY[device] if run is None else None
    kv_tokens, notes = _kv_tokens(config, sizes, capacity)
    fit = int(kv_tokens / (rates.prompt / config.rollout.n + rates.mean_length))
    rows = min(config.rollout.max_batch_rows, fit)
    if rows < 1:
        raise UserError(
            f"A KV cache of {kv_tokens} tokens holds no response of the mean length; raise rollout.kv_tokens, or "
            "gpu_memory_utilization in rollout.vllm_options."
        )
    if rows < config.rollout.max_batch_rows:
        notes.append(f"A KV cache of {kv_tokens} tokens holds {rows} of the rows in rollout.max_batch_rows.")
    if config.rollout.program != "flat":
        notes.append(f"Responses of '{config.rollout.program}' are simulated one by one, without shared prefixes.")
    if gpus > 1:
        notes.append("Layouts in which engines share GPUs with ranks (colocated) are not modelled.")
    layouts = []
    for ranks in _ranks(gpus, config.trainer.prompts_per_step):
        scenario = Scenario(
            budget=budget(config),
            n=config.rollout.n,
            prompt=rates.prompt,
            lengths=rates.lengths,
            rows=rows,
            ranks=ranks,
            engines=max(1, gpus - ranks),
            engine=rates.engine,
            trainer=rates.trainer,
            publish_s=rates.publish_s(ranks) if gpus > 1 else 0.0,
            load_s=rates.load_s(gpus - ranks, ranks) if gpus > 1 else 0.0,
            keep_keys=config.loop.keep_keys,
            judge_s=rates.judge_s,
            judges=config.reward.workers * max(1, config.reward.hosts),
            look_s=look_s(rates.engine, rates.lengths, config.rollout.n),
            seed=config.seed,
        )
        settling = 2 * (staleness + 1)
        outcome = simulate(scenario, settling + max(4, 2 * (staleness + 1)), settling)
        trainer, engine = _memory(config, sizes, ranks, gpus - ranks, kv_tokens)
        fits = None if capacity is None else max(trainer, engine) <= capacity
        layouts.append(Layout(ranks, gpus - ranks, trainer / 1e9, engine / 1e9, fits, outcome))
    return Plan(rates, notes, layouts)


def _ranks(gpus: int, prompts: int) -> list[int]:
    """Return the numbers of ranks to try: all, or seven of many; more than the trees of a batch are of no use."""
    if gpus == 1:
        return [1]
    each = max(1, gpus // 8)
    return [ranks for ranks in range(each, gpus, each) if ranks <= prompts or ranks == each][:7]


def _sizes(config: TrainConfig) -> ModelSizes:
    path = Path(config.model.path)
    if not (path / "config.json").is_file():
        remedy = f"; `rolltree train` makes it by {config.model.create}" if config.model.create else ""
        raise UserError(f"`rolltree plan` needs config.json of the model, which '{path}' (model.path) lacks{remedy}.")
    return read_sizes(path, config.model.lora)


def _kv_tokens(config: TrainConfig, sizes: ModelSizes, capacity: float | None) -> tuple[int, list[str]]:
    """Return the capacity of an engine's KV cache, and notes about it."""
    rollout = config.rollout
    if rollout.backend == "native" or capacity is None:
        return rollout.kv_tokens, []
    share = float(rollout.vllm_options.get("gpu_memory_utilization", VLLM_SHARE))
    room = share * capacity - sizes.parameters * BYTES[config.model.dtype]
    tokens = max(0, int(room / sizes.key_bytes(config.model.dtype)))
    return tokens, [f"vLLM takes {100 * share:.0f} % of a GPU: a KV cache of {tokens} tokens."]


def _memory(config: TrainConfig, sizes: ModelSizes, ranks: int, engines: int, kv_tokens: int) -> tuple[float, float]:
    """Return the bytes on a GPU that trains and on one that samples."""
    weights = sizes.parameters * BYTES[config.model.dtype]
    reference = config.roles.reference
    roles = scoring_roles(config) - (config.model.lora is not None and reference is not None and reference.path is None)
    trainer = (sizes.training_bytes(config.model.dtype) + roles * weights) / ranks
    keys = kv_tokens * sizes.key_bytes(config.model.dtype)
    return (trainer, weights + keys) if engines else (trainer + keys, trainer + keys)
