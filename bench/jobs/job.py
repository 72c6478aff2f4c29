"""``rolltree bench job CONFIG``: a whole job of reinforcement learning by several trainers, accuracy over time.

The job is a configuration of `rolltree train`. Each trainer runs in its own process (`job_runs`), one after another,
and saves its weights at the steps where the held-out problems are due. The problems are answered greedily afterwards,
all by the same engine. Seconds and tokens are those of the training alone; peak memory is that of the whole process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rolltree.engine.record.spent import Spent, crossing

from ..journal import Journal
from ..schema import Context, Row, append_line, rows_at
from ..table import table
from ..timing import quantiles

PROVIDERS = {
    "trl": ("trl",),
    "trl+rolltree": ("trl",),
    "trl+vllm": ("trl", "vllm"),
    "rolltree_flat": (),
    "rolltree_efficient": (),
    "rolltree_tree": (),
    "rolltree_s1": (),
}
"""The trainers, and the packages that each needs in addition to this project's."""
BASE = "trl"
"""The provider whose times are divided by the others' for rows of metric "speedup"."""
SEED = ", seed "
"""Precedes the seed in the name of a case."""
SIGMAS = 0.8416
"""Distance from the median of a normal distribution to its 80th percentile, in standard deviations."""


@dataclass(frozen=True)
class Point:
    """A line of ``job.curves.jsonl``: a provider's progress when the held-out problems were due."""

    case: str
    provider: str
    step: int
    seconds: float  # of training, after everything was loaded
    tokens: int  # sampled so far; one that several responses share counts once
    accuracy: float
    problems: int
    device: str
    versions: dict[str, str]
    commit: str
    time: str  # UTC, ISO 8601
    flop: float | None = None  # computed so far, without evaluations; None where the provider does not count them
    targets: Sequence[float] = ()  # `evaluation.targets` of the configuration


def readings(points: Sequence[Point]) -> list[tuple[Spent, float]]:
    """Return what a run had spent at each evaluation, and its accuracy there; 0 FLOP where they were not counted."""
    return [(Spent(point.flop or 0.0, point.tokens, point.seconds), point.accuracy) for point in points]


def main(argv: Sequence[str]) -> int:
    """Run the job with every provider; return 0, 1 if one failed, 2 if the command line is wrong."""
    parser = argparse.ArgumentParser(
        prog="rolltree bench job",
        description="A whole job by TRL and by rolltree: held-out accuracy over seconds and over tokens.",
        epilog="any key of the configuration can be given too, as in --seed 1 or --model.path DIRECTORY",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="TOML file of `rolltree train`")
    parser.add_argument("--providers", default="", metavar="REGEX", help="only providers whose names contain it")
    parser.add_argument("--steps", metavar="N", help="trainer.steps")
    parser.add_argument("--every", metavar="N", help="evaluation.every: steps between points of a curve")
    parser.add_argument("--limit", type=float, default=3600.0, metavar="S", help="of one provider; default %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), metavar="DIR", help="default %(default)s")
    parser.add_argument("--list", action="store_true", help="only list the providers")
    args, overrides = parser.parse_known_args(argv)
    for key, value in (("trainer.steps", args.steps), ("evaluation.every", args.every)):
        overrides += [f"--{key}", value] if value is not None else []
    try:
        chosen = [name for name in PROVIDERS if re.search(args.providers, name)]
        if args.list:
            print("\n".join(chosen))
            return 0
        return _run(args.config, overrides, chosen, args.limit, args.out)
    except re.error as error:
        print(f"rolltree bench: '{error.pattern!r}' is not a regular expression: {error}", file=sys.stderr)
    except ImportError as error:
        print(f"rolltree bench: job needs {error.name}; install rolltree[train,tasks].", file=sys.stderr)
    return 2


def _run(path: str, overrides: Sequence[str], providers: Sequence[str], limit: float, out: Path) -> int:
    from transformers.utils import logging

    from rolltree.engine.app.assembly.sampling import prepare_model
    from rolltree.engine.app.config import load_config
    from rolltree.engine.errors import UserError
    from rolltree.engine.model.loading import choose_device

    logging.disable_progress_bar()
    try:
        config = load_config(path, overrides)
        if config.evaluation.problems == 0:
            raise UserError(f"'{path}' holds no problems out; set evaluation.problems.")
        if providers:
            prepare_model(config)  # made once, before any provider's clock runs
    except UserError as error:
        print(f"rolltree bench: {error}", file=sys.stderr)
        return 2
    journal = Journal("job", out)
    context = Context.of(choose_device(config.model.device))
    for provider in providers:
        if not journal.known(case_of(config), provider):
            one(config, provider, journal, context, limit)
    rows = [row for row in journal.rows if row.case == case_of(config)]
    print(table(rows))
    if journal.problems:
        print(f"{len(journal.problems)} failed:", *journal.problems, sep="\n  ")
    return 1 if journal.problems else 0


def case_of(config: Any) -> str:
    trainer = config.trainer
    shape = f"{trainer.steps} steps of {trainer.prompts_per_step} x {config.rollout.n}"
    return f"{config.name}, {shape}, at most {config.rollout.max_new_tokens} tokens{SEED}{config.seed}"


def apart(case: str) -> tuple[str, str]:
    """Return a case's name without the seed, and the seed, or an empty text if it has none."""
    job, mark, seed = case.rpartition(SEED)
    return (job, seed) if mark else (case, "")


def of_seeds(job: str, seeds: Sequence[str]) -> str:
    """Return the name of one job's cases."""
    return job + (f"{SEED if len(seeds) == 1 else ', seeds '}{', '.join(seeds)}" if any(seeds) else "")


def name_of(case: str) -> str:
    """Return the name of the configuration in a case's name, which :func:`case_of` made."""
    return case.rsplit(", ", 3)[0]


def one(config: Any, provider: str, journal: Journal, context: Context, limit: float) -> None:
    """Run the job with ``provider`` and write its points and rows into the files of ``journal``."""
    from .job_runs import STEPS

    case, out = case_of(config), journal.directory
    assert out is not None
    missing = next((name for name in PROVIDERS[provider] if importlib.util.find_spec(name) is None), None)
    if missing is not None:
        print(f"{provider} does not run: {missing} is not installed", flush=True)
        journal.record(case, provider, "absent", missing)
        return
    directory = out / f"job.{provider}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    journal.begin(case, provider)
    began = time.perf_counter()
    problem = _process(config, provider, directory, limit)
    print(f"{provider}: {time.perf_counter() - began:.0f} s in all", flush=True)
    if problem is not None:
        print(journal.record(case, provider, *problem), flush=True)
    file = directory / STEPS
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    points = list(_points(config, provider, lines, directory, context))
    for point in points:
        append_line(asdict(point), out / "job.curves.jsonl")
        print(
            f"  step {point.step}: {100 * point.accuracy:.1f} % after {point.seconds:.1f} s, {point.tokens} tokens",
            flush=True,
        )
    if problem is None:
        recorded = _recorded(journal)
        rows = list(_rows(case, provider, lines, points, context))
        journal.finish(case, [*rows, *speedups(rows, recorded)], provider)
        shutil.rmtree(directory)


def _process(config: Any, provider: str, directory: Path, limit: float) -> tuple[Any, str] | None:
    """Run the job in ``directory``; return None, or what went wrong."""
    from .job_runs import CONFIG, REFUSAL

    (directory / CONFIG).write_text(config.model_dump_json(), encoding="utf-8")
    command = [sys.executable, "-m", "rolltree.bench.jobs.job_runs", provider, str(directory)]
    log = directory / "log.txt"
    with log.open("w") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return "stopped", f"it took longer than {limit:g} s"
        finally:
            with suppress(ProcessLookupError):  # the process, and workers that it may have left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if (directory / REFUSAL).exists():
        return "unsupported", (directory / REFUSAL).read_text(encoding="utf-8")
    if status != 0:
        last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        return "failed", f"{last} (exit status {status}; {log} has the rest)"
    return None


def _points(
    config: Any, provider: str, lines: Sequence[dict[str, Any]], directory: Path, context: Context
) -> Iterator[Point]:
    """Evaluate the saved weights, after those of the untrained model."""
    from .job_runs import weights_of

    kept = [(0, 0.0, 0, None)] + [
        (line["step"], line["seconds"], line["tokens"], weights_of(directory, line["step"]))
        for line in lines
        if line["weights"] and weights_of(directory, line["step"]).exists()
    ]
    measured = accuracies(config, [file for *_, file in kept]) if len(kept) > 1 else []
    for (step, seconds, tokens, _), accuracy in zip(kept, measured, strict=False):
        evaluation = config.evaluation
        point = Point(
            case_of(config), provider, step, seconds, tokens, accuracy, evaluation.problems, **asdict(context)
        )
        yield replace(point, targets=evaluation.targets)


def accuracies(config: Any, files: Sequence[Path | None]) -> Iterator[float]:
    """Yield the share of held-out problems that the model solves with each file's weights; None: with its own."""
    from safetensors.torch import load_file

    from rolltree.engine.app.assembly.sampling import (
        greedy_params,
        make_engine,
        make_run_rewards,
        prepare_model,
        rollout_program,
    )
    from rolltree.engine.loop.evaluation import Evaluation
    from rolltree.engine.parts.context import Context as Asked
    from rolltree.engine.prompts.prompts import held_out
    from rolltree.engine.rollout.local import LocalSampler

    from ..runs.long_tail import Quiet

    native = config.model_copy(update={"rollout": config.rollout.model_copy(update={"backend": "native"})})
    model, tokenizer = prepare_model(native)
    model.eval().requires_grad_(False)
    engine = make_engine(native, model, tokenizer)
    quiet: Any = Quiet()
    program = rollout_program(config.rollout)
    problems = held_out(config.data, config.evaluation.problems, tokenizer)
    sampler = LocalSampler(engine, program)
    evaluation = Evaluation(problems, greedy_params(config), 0, sampler, tokenizer, quiet)
    with make_run_rewards(config, program, engine, tokenizer, Asked(tokenizer)) as rewards:
        for number, file in enumerate(files):
            if file is not None:
                weights = load_file(file, device=str(model.device))
                for name, parameter in model.named_parameters():
                    parameter.copy_(weights[name])
                engine.update_weights()
            yield evaluation.run(number, rewards)["eval/accuracy"]


def _recorded(journal: Journal) -> list[Row]:
    """Return the rows of this run and of earlier ones in the same directory."""
    assert journal.directory is not None
    file = journal.directory / "job.jsonl"
    return rows_at(file) if file.exists() else []


def speedups(rows: Sequence[Row], recorded: Sequence[Row]) -> Iterator[Row]:
    """Yield the ratio of the time of `BASE`, as last recorded, to each time of another provider's ``rows``."""
    for row in rows:
        if row.metric == "time_ms" and row.provider != BASE:
            same = (row.case, BASE, row.direction, row.metric)
            times = [r for r in recorded if (r.case, r.provider, r.direction, r.metric) == same]
            if times:
                low, middle, high = (times[-1].value / ms for ms in (row.p80, row.value, row.p20))
                yield replace(row, metric="speedup", p20=low, value=middle, p80=high)


def _rows(
    case: str, provider: str, lines: Sequence[dict[str, Any]], points: Sequence[Point], context: Context
) -> Iterator[Row]:
    """Yield step time, job time, the time to each target that was reached, peak memory, and the last accuracy with its
    sampling error."""

    def row(direction: str, metric: str, p20: float, value: float, p80: float) -> Row:
        return Row("job", case, provider, direction, metric, value, p20, p80, None, **asdict(context))

    ends = [0.0] + [line["seconds"] for line in lines if not line["weights"]]
    yield row("step", "time_ms", *quantiles([1e3 * (b - a) for a, b in pairwise(ends)]))
    last = points[-1]
    yield row("job", "time_ms", *[1e3 * last.seconds] * 3)
    for target in last.targets:
        if (then := crossing(readings(points), target, ended=True)) is not None:
            yield row(f"to {100 * target:g} %", "time_ms", *[1e3 * then.seconds] * 3)
    yield row("job", "peak_memory_mib", *[max(line["peak_memory_mib"] for line in lines)] * 3)
    error = SIGMAS * math.sqrt(last.accuracy * (1 - last.accuracy) / last.problems)
    yield row("job", "accuracy", last.accuracy - error, last.accuracy, last.accuracy + error)
