"""``rolltree bench curves CONFIG``: whole runs of recipes, held-out accuracy over sampled tokens and over seconds.

The configuration is one of `rolltree train` without a method; each recipe is added to it, with sizes that fit the job
(`RECIPES`), or those that ``--tune`` has found and ``--tuned`` takes (`tuning`). Runs follow one another in this
process, one for every recipe, setting and seed, after one step of the first that is not counted; all begin with the
same weights and answer the same held-out problems. An interrupted campaign continues with the runs that have not ended.

Tokens are those that the policy sampled for training, with those of groups that were dropped, and those of responses
that it was given to imitate; one that several responses share counts once. Seconds are of the processor, summed over
the threads of this process, so that other work of the machine matters little; the processes that judge, the evaluations
and what precedes the first step are not counted.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.assembly.sampling import prepare_model
from rolltree.engine.app.config import load_config
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import RunError, UserError
from rolltree.engine.loop.evaluation import Evaluation
from rolltree.engine.model.loading import choose_device
from rolltree.engine.rewards import Rewards
from rolltree.engine.settings import TrainConfig

from ..journal import Journal
from ..schema import Context, Row, append_line
from ..timing import quantiles
from . import tuning
from .job import Point
from .tuning import Setting

BASE = "grpo"
"""The recipe with which the others are compared."""
BRANCHING = "{ segment_tokens = 8, max_depth = 6, branch = 2, init = 4 }"
ALIKE = "{ by = 'metadata.num_terms' }"
"""Sums of as many numbers are alike, as a curriculum has to be told where each problem comes once."""
TUNED = {
    "trainer.prompts_per_step": "8",
    "trainer.updates_per_step": "2",
    "trainer.lr": "6e-5",
    "trainer.lr_warmup_steps": "0",
    "trainer.steps": "40",
    "evaluation.every": "4",
}
"""Sizes of GRPO without a reference and of what is compared with it: half the groups of a step, twice as many steps.
One or two updates, and the rate of each recipe, 6e-5 or 1e-4, were chosen on seeds 100 and 101 by the FLOP to 90 %."""
RECIPES: dict[str, dict[str, str]] = {
    BASE: {},
    "dapo": {},
    "dr_grpo": {},
    "rloo": {},
    "reinforce_pp": {},
    "ppo": {"roles.critic.lr": "1e-4"},
    "gspo": {},
    "cispo": {},
    "treepo": {"rollout.program_options": BRANCHING, "rollout.n": "8", "trainer.steps": "26"},
    "pods": {"trainer.prompts_per_step": "8"},
    "high_entropy": {},
    "raft": {},
    "w_reinforce": {},
    "grpo_tuned": {"recipe": "", **TUNED},
    "grpo_flat": {"recipe": "", **TUNED},
    "cut": {"recipe": "", "algorithm.cut": "0.97", **TUNED, "trainer.lr": "1e-4"},
    "aero": {**TUNED, "trainer.lr": "1e-4"},
    "efficient": {**TUNED, "trainer.lr": "1e-4"},
    "fifo_replay": TUNED,
    "speed_rl": TUNED,
    "posterior": {"recipe": "", "data.curriculum": "posterior", "data.curriculum_options": ALIKE, **TUNED},
    "knapsack": {"data.curriculum_options": ALIKE, **TUNED},
    "treepo_tuned": {"recipe": "treepo", "rollout.program_options": BRANCHING, "rollout.n": "8", **TUNED},
    "spo_tree": {
        "rollout.program_options": "{ branch_factors = [2, 2, 2], segment_tokens = 12 }",
        "rollout.n": "8",
        **TUNED,
        "trainer.steps": "120",
        "evaluation.every": "12",
    },
    "latr": {"rollout.program_options": "{ lookahead = 8 }", "rollout.n": "8", **TUNED},
}
"""Recipes, and keys that differ from the recipe's own and from the campaign's: segments for responses of 48 tokens, as
in `arithmetic_cpu.toml`, and more steps, as these share tokens; a critic's rate as in `ppo_critic_cpu.toml`; and half
of the prompts where each has twice as many responses; and shorter segments and lookaheads, as responses are short."""
ACTS = re.compile(
    r"actor/(pg_clipfrac|ppo_kl|entropy|grad_norm|kl_loss|skipped_updates)|response_length/(mean|clip_ratio)|critic/.*"
    r"|tree/token_ratio|group/dropped_.*|filter/.*|reward/(mean|group_std)"
)
"""Metrics that show what a recipe does in a run; their medians over the steps are recorded."""
CURVES = "recipes.curves.jsonl"
FLAT = "grpo_flat"
"""The recipe whose updates compute each response with a prompt of its own, as trainers on flat batches do, and whose
sampler computes each by itself below a shared prompt, as engines with a prefix cache do."""


class Reading(NamedTuple):
    """The figures of a run at an evaluation."""

    step: int
    seconds: float
    tokens: int
    accuracy: float


def main(argv: Sequence[str]) -> int:
    """Run what has not run yet; return 0, 1 if a run failed, 2 if the command line is wrong."""
    parser = argparse.ArgumentParser(
        prog="rolltree bench curves",
        description="Whole runs of recipes: held-out accuracy over sampled tokens and over seconds.",
        epilog="any key of the configuration can be given too, as in --trainer.steps 10",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG", help="TOML file of `rolltree train` that names no method")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), metavar="NAME", help="default: %(default)s")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--tune", nargs="+", default=[], metavar="KEY=VALUE,VALUE", help="try each combination; keep each recipe's best"
    )
    parser.add_argument("--tuned", type=Path, metavar="FILE", help="sizes of each recipe that --tune has chosen")
    parser.add_argument("--within", type=float, metavar="S", help="begin no run after so many seconds")
    parser.add_argument("--out", type=Path, default=Path("runs/curves"), metavar="DIR", help="default %(default)s")
    args, overrides = parser.parse_known_args(argv)
    begin = time.perf_counter()
    journal = Journal("recipes", args.out)
    try:
        settings = tuning.grid(args.tune) if args.tune else [{}]
        tuned = tuning.read(args.tuned, args.recipes) if args.tuned else {}
        plan = [
            Planned(
                recipe,
                setting,
                load_config(
                    args.config,
                    [*_keys(recipe, seed), *tuning.flags(tuned.get(recipe, {})), *tuning.flags(setting), *overrides],
                ),
            )
            for seed in args.seeds
            for recipe in args.recipes
            for setting in settings
        ]
        left = [planned for planned in plan if not journal.known(planned.case, planned.recipe)]
        if plan and plan[0].config.evaluation.problems == 0:
            raise UserError(f"'{args.config}' holds no problems out; set evaluation.problems.")
        if args.tune and not plan[0].config.evaluation.targets:
            raise UserError(f"'{args.config}' has no targets to tune for; set evaluation.targets.")
        if left:
            prepare_model(left[0].config)
            _warm_up(left[0].config)
    except UserError as error:
        print(f"rolltree bench: {error}", file=sys.stderr)
        return 2
    for number, planned in enumerate(left):
        if args.within is not None and time.perf_counter() - begin > args.within:
            print(f"Not run yet: {len(left) - number}. The same command continues with them.")
            break
        _one(planned, journal)
    else:
        if args.tune:
            _choose(plan, settings, args.out)
    if journal.problems:
        print(f"{len(journal.problems)} failed:", *journal.problems, sep="\n  ")
    return 1 if journal.problems else 0


class Planned(NamedTuple):
    """A run of the campaign."""

    recipe: str
    setting: Setting
    config: TrainConfig

    @property
    def case(self) -> str:
        """The name of the campaign, the setting if one is tried, and the seed."""
        return ", ".join([*filter(None, [self.config.name, tuning.said(self.setting)]), f"seed {self.config.seed}"])


def _choose(plan: Sequence[Planned], settings: Sequence[Setting], out: Path) -> None:
    """Print the settings of each recipe and write the best."""
    lines = (out / CURVES).read_text(encoding="utf-8").splitlines()
    of_run: dict[tuple[str, str], list[Point]] = {}
    for point in (Point(**json.loads(line)) for line in lines):
        of_run.setdefault((point.case, point.provider), []).append(point)
    tries: dict[str, dict[str, list[list[Point]]]] = {}
    for planned in plan:
        runs = tries.setdefault(planned.recipe, {}).setdefault(tuning.said(planned.setting), [])
        runs.append(of_run.get((planned.case, planned.recipe), []))
    targets = plan[0].config.evaluation.targets
    best = tuning.choose(tries, targets)
    for recipe, of_recipe in tries.items():
        for name, runs in of_recipe.items():
            missed, flop = tuning.score(runs, targets)[:2]
            reached = f"{len(runs) - missed:g} of {len(runs)} reach {100 * max(targets):g} %"
            mark = "  <- best" if name == best[recipe] else ""
            print(f"{recipe}, {name}: {reached}" + (f" after {flop / 1e9:.3g} GFLOP" if flop else "") + mark)
    of_name = {tuning.said(setting): setting for setting in settings}
    path = tuning.write({recipe: of_name[name] for recipe, name in best.items()}, out)
    print(f"Written to {path}; give it to --tuned, with other seeds.")


def _keys(recipe: str, seed: int) -> Iterator[str]:
    for key, value in {"recipe": recipe, "seed": str(seed), **RECIPES.get(recipe, {})}.items():
        if value:
            yield from (f"--{key}", value)


def _warm_up(config: TrainConfig) -> None:
    """Take one step, so that what happens once in a process is in no run's seconds."""
    with tempfile.TemporaryDirectory() as directory:
        trainer = config.trainer.model_copy(update={"steps": 1})
        train(config.model_copy(update={"output_dir": directory, "trainer": trainer}))


def _one(planned: Planned, journal: Journal) -> None:
    """Take a run and write its points and rows into the files of ``journal``."""
    recipe, _, config = planned
    case, out, context = planned.case, journal.directory, Context.of(choose_device(config.model.device))
    assert out is not None
    directory = out / f"{recipe}-{config.seed}"
    shutil.rmtree(directory, ignore_errors=True)
    journal.begin(case, recipe)
    try:
        readings, steps = train(config.model_copy(update={"output_dir": str(directory)}), flat=recipe == FLAT)
    except (RunError, UserError) as error:
        print(journal.record(case, recipe, "failed", str(error)), flush=True)
        return
    for step, seconds, tokens, accuracy in readings:
        point = Point(case, recipe, step, seconds, tokens, accuracy, config.evaluation.problems, **asdict(context))
        flop = steps[step - 1]["perf/flop_so_far"] if step else 0.0
        append_line(asdict(replace(point, flop=flop, targets=config.evaluation.targets)), out / CURVES)
    journal.finish(case, _acts(case, recipe, steps, context), recipe)
    shutil.rmtree(directory)
    accuracies = " ".join(f"{100 * reading.accuracy:.1f}" for reading in readings)
    last = readings[-1]
    which = ", ".join(filter(None, [recipe, tuning.said(planned.setting), f"seed {config.seed}"]))
    print(f"{which}: {accuracies} % in {last.seconds:.1f} s, {last.tokens} tokens", flush=True)


def _acts(case: str, recipe: str, steps: Sequence[Mapping[str, float]], context: Context) -> Iterator[Row]:
    """Yield the median over ``steps``, with the 20th and 80th percentile, of each metric that `ACTS` names; a step
    without it counts as 0."""
    for name in sorted({name for step in steps for name in step if ACTS.fullmatch(name)}):
        p20, value, p80 = quantiles([step.get(name) or 0.0 for step in steps])
        yield Row("recipes", case, recipe, "step", name, value, p20, p80, None, **asdict(context))


def train(config: TrainConfig, *, flat: bool = False) -> tuple[list[Reading], list[dict[str, float]]]:
    """Train, and return what was read at each evaluation and the metrics of each step.

    Args:
        flat: updates share no prefixes, and each response is a row of its own while it is sampled.

    Raises:
        RunError: the run failed.
        UserError: the configuration cannot be run.
    """
    every = config.checkpoint.model_copy(update={"every": config.trainer.steps, "best": None})
    clock: Any = _Clock()
    run = build(config.model_copy(update={"checkpoint": every, "trackers": ()}), console=clock)
    sampler: Any = run.sampler
    learner: Any = run.learner
    if flat:
        learner.batches.flat, sampler.engine.loop.merges = True, False
    old = run.evaluation
    evaluation = _Aside(old.problems, old.params, old.every, run.sampler, run.tokenizer, clock)
    clock.engine, evaluation.clock = sampler.engine, clock
    run.demonstrations = _Counted(run.demonstrations, clock)  # type: ignore[assignment]
    run.evaluation = run.checkpoints.evaluation = evaluation
    run.run()
    lines = (config.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return clock.readings, [json.loads(line) for line in lines[1:]]


class _Clock:
    """The progress of a run: the seconds and tokens that belong to its training."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.readings: list[Reading] = []
        self.began = self.stood = 0.0
        self.aside = 0  # tokens of evaluations
        self.imitated = 0  # tokens of demonstrations

    def phase(self, text: str) -> None:
        if self.engine is not None and self.sampled() == self.aside and not self.imitated:  # the training has not begun
            self.began, self.stood = time.process_time(), 0.0

    def sampled(self) -> int:
        return int(self.engine.stats["sampled_tokens"])

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class _Aside(Evaluation):
    """Evaluates as the run would, while the clock stands."""

    clock: _Clock

    def run(self, step: int, rewards: Rewards) -> dict[str, float]:
        clock, begin, before = self.clock, time.process_time(), self.clock.sampled()
        metrics = super().run(step, rewards)
        seconds = begin - clock.began - clock.stood if step else 0.0
        tokens = before - clock.aside + clock.imitated
        clock.readings.append(Reading(step, seconds, tokens, metrics["eval/accuracy"]))
        clock.aside += clock.sampled() - before
        clock.stood += time.process_time() - begin
        return metrics


class _Counted:
    """The demonstrations of a run, whose tokens the clock counts."""

    def __init__(self, demonstrations: Any, clock: _Clock) -> None:
        self._demonstrations, self._clock = demonstrations, clock

    def next(self) -> list[TokenTree]:
        trees: list[TokenTree] = self._demonstrations.next()
        self._clock.imitated += sum(tree.num_tokens - tree.prompt_length for tree in trees)
        return trees

    def __getattr__(self, name: str) -> Any:
        return getattr(self._demonstrations, name)
