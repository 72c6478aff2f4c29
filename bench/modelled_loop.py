"""What staleness gains on H100 and H200 where lengths have a long tail, by a model; nothing here was measured.

``python -m rolltree.bench.modelled_loop`` writes bench/results/model-sm_90/loop.jsonl and loop.md: runs on one GPU by
the settings of bench/loop.py, whose decisions `modelled_sampling` goes through. Lengths are log-normal with sigma 1. A
decode step takes the larger of

- its bytes at `STREAM_SHARE` of the memory's rate: the weights once, keys and values of a prompt once a group, of what
  was sampled once a row;
- its FLOP at `GEMM_SHARE` of the peak: 2 a weight and row, 4 D a head, layer, key and row; prompts and keys that are
  computed again, in chunks beside the rows, count as rows;

and `HOST` seconds. An update takes three times the FLOP of a forward, a prompt's once a group, at `MFU` of the peak.

Where sampling overlaps with updates a setting has two rows. ``in turns``: while both work each has half of the device,
so that nothing but better filled steps saves time. ``beside``: decode steps, which wait for memory, and an update,
which waits for products, go on as fast as each alone. What two streams on one GPU reach lies between the two. The
other settings have one: sampling ``rests`` during an update.

Not in it: verdicts and tools, which cost nothing and come at once; the host's part of an update, and copies of weights;
pages that run out (``keys`` says how many bytes were held at most; AdamW's state of 8 B parameters alone exceeds either
GPU, so its rows stand for a share of several GPUs); lengths that depend on the prompt or change as it learns; what
staleness costs in learning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from rolltree.engine.settings import LoopConfig

from .loop import SETTINGS
from .modelled import FOLDER, GEMM_SHARE, MEMORY, PEAK, STREAM_SHARE, write
from .modelled_drafts import HOST
from .modelled_sampling import Array, Batch, Load, Loop

MFU = 0.40  # of updates; an assumption
WARM_UP, UPDATES = 10, 20
"""Updates before those that count, and these."""
ALL: dict[str, dict[str, Any]] = SETTINGS | {"rolltree S=4, partial rollouts": {"staleness": 4, "overlap": False}}


@dataclass(frozen=True)
class Shape:
    """Of a model's products."""

    name: str
    weights: float
    layers: int
    heads: int
    key_heads: int
    dim: int

    @property
    def key_bytes(self) -> int:
        """Of a token's keys and values."""
        return 2 * 2 * self.key_heads * self.dim * self.layers

    @property
    def pair(self) -> int:
        """FLOP of a query and a key."""
        return 4 * self.dim * self.heads * self.layers


SHAPES = (Shape("Qwen3-1.7B", 1.72e9, 28, 16, 8, 128), Shape("Qwen3-8B", 7.57e9, 36, 32, 8, 128))


@dataclass(frozen=True)
class Device:
    """Seconds of ``shape`` on a GPU."""

    shape: Shape
    memory: float
    """Bytes/s."""
    prompt: int

    def steps(self, load: Load, count: int) -> Array:
        more = np.arange(count) * load.rows
        size = 2 * self.shape.weights + (load.keys + more) * self.shape.key_bytes
        flop = (load.rows + load.prefill) * 2 * self.shape.weights + (load.visible + more) * self.shape.pair
        return np.maximum(size / (STREAM_SHARE * self.memory), flop / (GEMM_SHARE * PEAK)) + HOST

    def update(self, groups: Sequence[Sequence[int]]) -> float:
        tokens = sum(self.prompt + sum(lengths) for lengths in groups)
        visible = sum(self.prompt**2 / 2 + sum(n * (self.prompt + n / 2) for n in lengths) for lengths in groups)
        return 3 * (2 * self.shape.weights * tokens + self.shape.pair * visible) / (MFU * PEAK)


def log_normal(width: int, median: int, longest: int, ticket: int) -> list[int]:
    """Lengths of the responses to the group of ``ticket``."""
    drawn = np.random.default_rng([0, ticket]).lognormal(np.log(median), 1.0, width)
    return [min(longest, math.ceil(length)) for length in drawn.tolist()]


@dataclass(frozen=True)
class Case:
    shape: Shape
    gpu: str
    prompts: int
    """Of an update, each with `WIDTH` responses."""
    rows: int

    def __str__(self) -> str:
        return f"{self.shape.name}, {self.prompts} x {WIDTH}, {self.rows} rows"


WIDTH, PROMPT, MEDIAN, LONGEST = 16, 512, 512, 8192
CASES = [
    Case(shape, gpu, prompts, rows) for shape in SHAPES for gpu in MEMORY for prompts, rows in ((16, 256), (64, 512))
]


@dataclass(frozen=True)
class Predicted:
    """Means over `UPDATES` updates."""

    case: str
    gpu: str
    setting: str
    sampling: str
    """Of the module's description: rests, in turns, beside."""
    update_s: float
    speedup: float
    idle: float
    """Share of the rows of full decode steps that sampled nothing."""
    steps: float
    """Decode steps an update."""
    lag: float
    """Of a group."""
    older: float
    """Share of an update's tokens that weights before those it updates sampled: partial responses, and whole ones that
    waited."""
    again: float
    """Keys computed again for each token sampled."""
    dropped: int
    """Groups."""
    keys_gb: float
    """Keys and values held at most."""
    kind: str = "model"


def predictions(case: Case) -> list[Predicted]:
    """Of every setting."""
    device = Device(case.shape, MEMORY[case.gpu], PROMPT)
    lengths = cache(partial(log_normal, WIDTH, MEDIAN, LONGEST))
    batch = Batch(case.prompts, PROMPT, case.rows, lengths)
    found: list[Predicted] = []
    for name, given in ALL.items():
        loop = LoopConfig(**given)
        for beside in (False, True) if loop.overlaps(on_cpu=False) else (False,):
            run = Loop(batch, loop, device, beside=beside)
            updates = run.run(WARM_UP + UPDATES)
            before, last, counted = updates[WARM_UP - 1], updates[-1], updates[WARM_UP:]
            seconds, steps = (last.seconds - before.seconds) / UPDATES, last.steps - before.steps
            row_steps, tokens = last.row_steps - before.row_steps, sum(update.tokens for update in counted)
            found.append(
                Predicted(
                    str(case),
                    case.gpu,
                    name,
                    ("beside" if beside else "in turns") if loop.overlaps(on_cpu=False) else "rests",
                    update_s=seconds,
                    speedup=found[0].update_s / seconds if found else 1.0,
                    idle=1 - row_steps / (steps * case.rows),
                    steps=steps / UPDATES,
                    lag=float(np.mean([lag for update in counted for lag in update.lags])),
                    older=sum(update.stale for update in counted) / tokens,
                    again=(last.recomputed - before.recomputed) / row_steps,
                    dropped=run.buffer.dropped.total(),
                    keys_gb=run.sampler.most_keys * case.shape.key_bytes / 1e9,
                )
            )
    return found


def rows(of: Iterable[Predicted]) -> list[dict[str, Any]]:
    """As they are written, numbers to four digits."""
    return [{k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in asdict(p).items()} for p in of]


def table(of: Sequence[dict[str, Any]]) -> str:
    lines = [
        "# Long tails and staleness, predicted by a model, not measured",
        "",
        "`bench/modelled_loop.py` says from what, and what is not in it. Prompts of 512 tokens; lengths log-normal,",
        "sigma 1, median 512, at most 8192. Older tokens: sampled by weights before those that learn from them. Keys",
        "again: computed again after an update, for each token sampled. No group was dropped.",
        "",
        "| GPU | model, batch | setting | sampling | rows idle | s an update | speed-up | steps | lag | older tokens "
        "| keys again | keys, GB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in of:
        cells = [row["gpu"], row["case"], row["setting"], row["sampling"], f"{row['idle']:.0%}"]
        cells += [f"{row['update_s']:.1f}", f"{row['speedup']:.2f}", f"{row['steps']:.0f}", f"{row['lag']:.2f}"]
        cells += [f"{row['older']:.0%}", f"{row['again']:.2f}", f"{row['keys_gb']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    of = rows(predicted for case in CASES for predicted in predictions(case))
    write(of, "loop.jsonl")
    (FOLDER / "loop.md").write_text(table(of))


if __name__ == "__main__":
    main()
