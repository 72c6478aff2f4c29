"""Writes the tables of figures in README.md, docs/benchmarks.md and docs/gpu.md: ``python -m rolltree.bench.readme``.

A table of all rows of a file stands between ``<!-- bench FOLDER/OP -->`` and ``<!-- end -->``, the README's summary
between ``<!-- summary FOLDER -->`` and ``<!-- end -->``, and that of whole jobs between ``<!-- jobs FOLDER/job -->``
and ``<!-- end -->``. In docs/curves.md, ``curves`` stands before the comparison of recipes, ``targets`` before what
they took to an accuracy, ``distilled`` before what learning from a teacher took, and ``actions`` before what each
recipe did in its runs. A test fails if a table differs from the rows. The curves of jobs are drawn into docs/job_*.png,
those of recipes into docs/curves_*.png.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, NamedTuple

from .jobs import curves_table
from .jobs.job import Point, apart, name_of, of_seeds
from .schema import REPOSITORY, Row, read
from .table import UNITS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGES = (REPOSITORY / "README.md", *(REPOSITORY / "docs" / f"{page}.md" for page in ("benchmarks", "curves", "gpu")))
RESULTS = REPOSITORY / "bench" / "results"
BLOCK = re.compile(
    r"(<!-- (bench|summary|jobs|curves|targets|distilled|actions) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL
)


class Line(NamedTuple):
    """A row of the summary: one case, rolltree against one peer."""

    what: str
    op: str
    case: str
    direction: str
    ours: str
    peer_provider: str
    peer: str


HEAD = "N=4096 H=512 V=151936 "
GROUP, LONG = "1024+16x128 layers 4 width 256 V=1024 float32", "32+4x512 layers 4 width 256 V=1024 float32"
TRL_GROUP = "512+8x128 layers 4 width 256 V=151936"
ROLLOUTS = "4 x (512 + 16x128) V=1024 float32 natural lengths"
CPU = (
    Line("a training step, prompt 1024, 16 responses of 128", "tree_step", GROUP, "step", "rolltree, tree",
         "flat, transformers sdpa", "Transformers, flat"),
    Line("the same, prompt 32, 4 responses of 512: little to share", "tree_step", LONG, "step", "rolltree, tree",
         "flat, transformers sdpa", "Transformers, flat"),
    Line("head and loss, vocabulary 151,936, forward and backward", "linear_policy_loss", HEAD + "all live",
         "forward+backward", "rolltree", "torch", "PyTorch"),
    Line("a step of TRL's GRPO, sampling included: prompt 512, 8 responses of 128, vocabulary 151,936", "trl_step",
         TRL_GROUP, "step", "rolltree, all parts", "TRL", "TRL 1.16"),
    Line("rollouts, 4 prompts of 512, 16 responses each", "rollout", ROLLOUTS, "generate", "rolltree", "vllm",
         "vLLM 0.32, CPU"),
)  # fmt: skip
ON_GPU = "N=8192 H=1024 V=151936 "
GPU = (
    Line("a training step, prompt 4096, 8 responses of 1024, Qwen3 0.6B", "tree_step",
         "4096+8x1024 Qwen3 0.6B bfloat16", "step", "rolltree, tree", "flat, transformers sdpa", "Transformers, flat"),
    Line("tree attention, prompt 4096, 28 responses of 1024, forward and backward", "tree_attention",
         "4096+28x1024 heads 32/8 D=128 bfloat16", "forward+backward", "rolltree", "flex_attention", "FlexAttention"),
    Line("head and loss, 8,192 rows, vocabulary 151,936, forward and backward", "linear_policy_loss",
         ON_GPU + "all live", "forward+backward", "rolltree", "torch", "PyTorch"),
    Line("the same, 36 % of the rows live", "linear_policy_loss", ON_GPU + "36 % live", "forward+backward", "rolltree",
         "torch", "PyTorch"),
    Line("a decode step's attention, 16 groups of 16 on prompts of 4096", "tree_decode",
         "P=4096 R=128 G=16 x 16 heads 16/8 D=128 bfloat16", "forward", "rolltree", "torch SDPA", "PyTorch"),
    Line("sampling 512 rows, vocabulary 151,936, top_p = 0.9", "sample_tokens", "N=512 V=151936 T=0.7 top_p=0.9",
         "forward", "rolltree", "transformers", "Transformers"),
)  # fmt: skip
SMOL = "SmolLM2-135M-Instruct 2 x "
PRETRAINED = tuple(
    Line(f"{dtype}, 2 prompts of {prompt}, {group} responses of {new} each", "rollout",
         f"{SMOL}({prompt} + {group}x{new}) {dtype}", "generate", "rolltree", "vllm", "vLLM 0.32, CPU")
    for dtype, shapes in (("bfloat16", ((128, 8, 128), (512, 16, 64), (512, 64, 64))),
                          ("float32", ((128, 8, 128), (512, 16, 64))))
    for prompt, group, new in shapes
)  # fmt: skip
SUMMARIES = {"epyc-avx2-2-cores": CPU, "epyc-zen4-2-cores": PRETRAINED, "h200": GPU}


def markdown(rows: Sequence[Row]) -> str:
    """Return a table with a line for each case, direction and provider: time, ceiling, peak memory, speedup."""
    lines = ["| case | | time | p20 to p80 | ceiling | memory | speedup |", "|---|---|---|---|---|---|---|"]
    by_line: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        by_line.setdefault((row.case, row.direction, row.provider), {})[row.metric] = row
    for (case, direction, provider), of in by_line.items():
        if "time_ms" not in of:  # a share, which has no time
            continue
        time = of["time_ms"]
        memory, speedup = of.get("peak_memory_mib"), of.get("speedup")
        ceiling = "" if time.ceiling is None else f"{_number(time.ceiling)} ms"
        ratio = ""
        if speedup is not None:
            limit = "" if speedup.ceiling is None else f" of {speedup.ceiling:.2f}"
            ratio = f"{speedup.value:.2f} x{limit} ({speedup.p20:.2f} to {speedup.p80:.2f})"
        cells = (
            case if direction == "step" else f"{case}, {direction}",
            provider,
            f"{_number(time.value)} ms",
            f"{_number(time.p20)} to {_number(time.p80)}",
            ceiling,
            "" if memory is None else f"{_number(memory.value)} {UNITS['peak_memory_mib']}",
            ratio,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", measured_on(rows)]) + "\n"


def measured_on(rows: Sequence[Row]) -> str:
    """Return a sentence with the devices, torch versions and commits of the rows."""
    parts = (
        {row.device for row in rows},
        {f"torch {row.versions['torch']}" for row in rows},
        {row.commit for row in rows},
    )
    devices, torches, commits = (" and ".join(sorted(filter(None, part))) for part in parts)
    return f"Measured on {devices}, {torches}, commit {commits}."


def jobs(rows: Sequence[Row]) -> str:
    """Return a table with a line for each job and provider: step time, job time, times to targets, memory, accuracy.

    A figure of several seeds is the mean of theirs, with the lowest and the highest.
    """
    lines = [
        "| job | | a step | speedup | all steps | to targets | memory | accuracy |",
        "|---|---|---|---|---|---|---|---|",
    ]
    of: dict[tuple[str, str], dict[str, dict[tuple[str, str], Row]]] = {}
    for row in rows:
        job, seed = apart(row.case)
        of.setdefault((job, row.provider), {}).setdefault(seed, {})[row.direction, row.metric] = row
    for (job, provider), runs in of.items():
        steps = [run["step", "time_ms"] for run in runs.values()]
        spread = min(step.p20 for step in steps), max(step.p80 for step in steps)
        gain = _mean(runs, "step", "speedup")
        whole, accuracy = (mean(_values(runs, "job", metric)) for metric in ("time_ms", "accuracy"))
        memory = max(run["job", "peak_memory_mib"].value for run in runs.values())
        cells = (
            of_seeds(job, list(runs)),
            provider,
            f"{_number(mean(step.value for step in steps))} ms ({' to '.join(map(_number, spread))})",
            "" if gain is None else f"{gain:.2f} x",
            f"{whole / 1e3:.0f} s",
            ", ".join(_to_targets(runs)),
            f"{_number(memory)} MiB",
            f"{100 * accuracy:.1f} %",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", measured_on(rows)]) + "\n"


def _values(runs: Mapping[str, Mapping[tuple[str, str], Row]], direction: str, metric: str) -> list[float]:
    return [run[direction, metric].value for run in runs.values() if (direction, metric) in run]


def _mean(runs: Mapping[str, Mapping[tuple[str, str], Row]], direction: str, metric: str) -> float | None:
    values = _values(runs, direction, metric)
    return mean(values) if values else None


def _to_targets(runs: Mapping[str, Mapping[tuple[str, str], Row]]) -> Iterator[str]:
    directions = dict.fromkeys(
        direction for run in runs.values() for direction, _ in run if direction.startswith("to ")
    )
    for direction in directions:
        seconds = [value / 1e3 for value in _values(runs, direction, "time_ms")]
        gain = _mean(runs, direction, "speedup")
        few = [f"{len(seconds)} of {len(runs)}"] if len(seconds) < len(runs) else []
        spread = [f"{min(seconds):.0f} to {max(seconds):.0f}"] if len(seconds) > 1 else []
        notes = [*few, *spread, *([] if gain is None else [f"{gain:.1f} x"])]
        yield f"{direction[3:]}: {mean(seconds):.0f} s" + (f" ({', '.join(notes)})" if notes else "")


def summary(folder: str) -> str:
    """Return the summary: case, rolltree's time, a peer's, their ratio, and the peak memory of both if measured."""
    out = ["| | rolltree | peer | | memory |", "|---|---|---|---|---|"]
    for line in SUMMARIES[folder]:
        rows = [r for r in read(RESULTS / folder / f"{line.op}.jsonl") if (r.case, r.direction) == line[2:4]]
        of = {(r.provider, r.metric): r for r in rows}
        ours, peer_ms = (of[provider, "time_ms"].value for provider in (line.ours, line.peer_provider))
        gain, other = (
            of.get((provider, "speedup")) for provider in (line.ours, line.peer_provider)
        )  # over the first provider of the case
        ratio = peer_ms / ours if gain is None else gain.value / (1.0 if other is None else other.value)
        peaks = [of.get((provider, "peak_memory_mib")) for provider in (line.ours, line.peer_provider)]
        memory = " : ".join(_number(peak.value) for peak in peaks if peak is not None)
        cells = (
            line.what,
            f"{_number(ours)} ms",
            f"{_number(peer_ms)} ms, {line.peer}",
            f"**{ratio:.2f} x**",
            f"{memory} MiB" if None not in peaks else "",
        )
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def rewritten(text: str) -> str:
    """Return ``text`` with every table replaced by the recorded rows."""

    def table(match: re.Match[str]) -> str:
        kind, name = match[2], match[3]
        if kind == "summary":
            return match[1] + summary(name) + match[4]
        of_points = {
            "curves": curves_table.markdown,
            "targets": curves_table.targets,
            "distilled": curves_table.distilled,
        }
        if kind in of_points:
            return match[1] + of_points[kind](recipe_points(RESULTS / name)) + match[4]
        of_file = {"jobs": jobs, "bench": markdown, "actions": curves_table.actions}[kind]
        return match[1] + of_file(read(RESULTS / f"{name}.jsonl")) + match[4]

    return BLOCK.sub(table, text)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def recipe_points(folder: Path) -> list[Point]:
    """Return the points of the runs of recipes that were recorded in ``folder``."""
    from . import plot

    return plot.read([folder / f"recipes{plot.CURVES}"])[1]


def _save(figure: Figure, path: Path, title: str) -> None:
    """Write a picture in 32 colours, a quarter of the bytes; one version of matplotlib writes the same each time."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    drawn, texts = io.BytesIO(), PngInfo()
    figure.savefig(drawn, dpi=150)
    texts.add_text("Title", title)
    Image.open(drawn).convert("RGB").quantize(32).save(path, optimize=True, pnginfo=texts)


def draw_recipes(results: Path = RESULTS, out: Path = REPOSITORY / "docs") -> None:
    """Draw the curves of recipes of each folder that has any."""
    for file in sorted(results.glob("*/recipes.curves.jsonl")):
        for name, figure in curves_table.figures(recipe_points(file.parent)):
            _save(figure, out / f"{name}.png", name)


def draw_jobs(results: Path = RESULTS, out: Path = REPOSITORY / "docs") -> None:
    """Draw the accuracy of each recorded job over seconds and over tokens.

    Raises:
        ValueError: a job was recorded on two machines or with two shapes; each job has one figure.
    """
    from . import plot

    _, points = plot.read(sorted(results.glob(f"*/job{plot.CURVES}")))
    jobs: dict[str, list[Point]] = {}
    for point in points:
        jobs.setdefault(name_of(point.case), []).append(point)
    for name, of_job in jobs.items():
        of = sorted({f"'{apart(point.case)[0]}' on {point.device}" for point in of_job})
        if len(of) > 1:
            raise ValueError(f"There are curves of {' and of '.join(of)}; keep those that job_{name}.png is to show.")
        ((_, figure),) = plot.curves(of_job)
        seeds = list(dict.fromkeys(apart(point.case)[1] for point in of_job))
        _save(figure, out / f"job_{name}.png", of_seeds(apart(of_job[0].case)[0], seeds))


def main() -> None:
    for page in PAGES:
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")
    draw_jobs()
    draw_recipes()


if __name__ == "__main__":
    main()
