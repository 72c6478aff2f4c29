"""The command line: ``rolltree train | rollout | plan | serve | bench | report | kernels | methods | doctor``.

Exit codes: 0 done, 1 the run failed, 2 the request was wrong, 130 interrupted, 141 the reader of the output has ended.
A failure prints one sentence on stderr; ``--debug`` adds the traceback.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import RefusedError, RunError, UserError
from ..parts.calling import failure
from .printable import printable

if TYPE_CHECKING:
    from ..settings import TrainConfig

EXTRAS = {
    "engine": ("transformers", "safetensors", "numba"),
    "train": ("pydantic", "pyarrow", "rich", "tomli_w"),
    "report": ("jinja2", "plotly"),
    "serve": ("fastapi", "uvicorn"),
    "tasks": ("reasoning_gym", "math_verify"),
    "lora": ("peft",),
}
"""Optional modules, by the extra that installs them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what it cannot encode is escaped
            stream.reconfigure(errors="backslashreplace")
    if argv[:1] == ["bench"]:  # it has a command line of its own, and the engine never imports it
        return int(importlib.import_module("rolltree.bench.cli").main(argv[1:]))
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if args.command is None:
        parser.print_help()
        return 2
    if rest and args.command not in ("train", "rollout", "plan", "kernels"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING)
    run: Callable[[argparse.Namespace, list[str]], int] = args.run
    try:
        code = run(args, rest)
        sys.stdout.flush()
        return code
    except BrokenPipeError as error:
        if not _reader_has_left():
            return _fail(args, error, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in its buffer goes nowhere
        return 128 + signal.SIGPIPE
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        extra = next((extra for extra, modules in EXTRAS.items() if missing in modules), None)
        if extra is None:
            return _fail(args, error, 1)
        return _fail(args, UserError(f"This needs {missing}; install it with `pip install 'rolltree[{extra}]'`."), 2)
    except UserError as error:
        return _fail(args, error, 2)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # Path.exists raises this instead of returning False
            return _fail(args, error, 1)
        name = str(error.filename)
        shown = name if len(name) <= 80 else f"{name[:38]}...{name[-38:]}"
        return _fail(args, UserError(f"The path '{shown}' is longer than the file system takes; shorten it."), 2)
    except KeyboardInterrupt:
        print("rolltree: interrupted; --resume continues a training run from its last checkpoint.", file=sys.stderr)
        return 130
    except (Exception, SystemExit) as error:  # user code may call sys.exit
        return _fail(args, error, 1)


def _fail(args: argparse.Namespace, error: BaseException, code: int) -> int:
    if args.debug:
        traceback.print_exception(error)
    message = " ".join(str(error).split())
    if not message or not isinstance(error, UserError | RunError | OSError | RuntimeError | ValueError):
        message = failure(error)
    message = printable(message.encode("utf-8", "backslashreplace").decode())
    hint = "" if isinstance(error, UserError | RunError) or args.debug else " (--debug shows the traceback)"
    print(f"rolltree: {message}{hint}", file=sys.stderr)
    return code


def _reader_has_left() -> bool:
    """Return whether standard output is a pipe whose reader has ended, as after ``| head``."""
    try:
        pipe = select.poll()
        pipe.register(sys.stdout.fileno(), 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in pipe.poll(0))
    except (OSError, ValueError):  # it is no file
        return False


class _Version(argparse.Action):
    def __call__(self, *_: object) -> None:
        print(f"rolltree {importlib.metadata.version('rolltree')}")
        sys.exit(0)


KEYS = "any key of the configuration can be given too, as in --trainer.lr 1e-6 or --seed 1"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rolltree", description="Reinforcement learning on trees of rollouts.")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace, list[str]], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        sub.set_defaults(run=run, command=name)
        return sub

    _train_arguments(command("train", _train, "Run the training that a TOML file describes."))
    _rollout_arguments(
        command("rollout", _rollout, "Sample trees for some training prompts and show them; nothing is trained.")
    )
    _plan_arguments(command("plan", _plan, "Simulate a configuration on N GPUs, layout by layout; nothing is run."))
    _serve_arguments(command("serve", _serve, "Serve a model on this machine with an OpenAI-compatible API."))
    _report_arguments(command("report", _report, "Write report.html of a run, or one page that compares several."))
    _kernels_arguments(command("kernels", _kernels, "Compile a run's kernels ahead of time; needs no GPU."))
    _methods_arguments(
        command("methods", _methods, "List recipes, objectives, advantage estimators and rollout programs.")
    )
    command("doctor", _doctor, "Show what was found on this machine and what is missing.")
    commands.add_parser("bench", help="Time the ops, their peers and limits; see `rolltree bench --help`.")
    return parser


def _train_arguments(train: argparse.ArgumentParser) -> None:
    train.add_argument("config", metavar="CONFIG", help="TOML file")
    train.add_argument("--resume", action="store_true", help="continue from the run's newest checkpoint")
    train.add_argument(
        "--replay", type=Path, metavar="FILE", help="learn from the groups of `rolltree rollout --record FILE`"
    )
    train.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and the plan; write nothing"
    )
    train.add_argument(
        "--check-data", action="store_true", help="try every row of data.path before the run, not only a sample"
    )
    train.epilog = KEYS


def _rollout_arguments(rollout: argparse.ArgumentParser) -> None:
    rollout.add_argument("config", metavar="CONFIG", help="TOML file")
    rollout.add_argument(
        "--prompts", type=_integer(1, 2**31 - 1), default=2, metavar="N", help="prompts to sample for (default 2)"
    )
    rollout.add_argument("--out", type=Path, metavar="FILE", help="also write the trees to this parquet file")
    rollout.add_argument(
        "--record", type=Path, metavar="FILE", help="also keep the groups for `rolltree train --replay`"
    )
    rollout.epilog = KEYS


def _plan_arguments(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("config", metavar="CONFIG", help="TOML file")
    plan.add_argument("--gpus", type=_integer(1, 4096), required=True, metavar="N", help="number of GPUs")
    rates = plan.add_mutually_exclusive_group()
    rates.add_argument("--device", default="H100", choices=["H100", "H200"], help="GPU (default H100)")
    rates.add_argument("--rates", type=Path, metavar="RUN_DIR", help="use the rates and lengths of this run instead")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.epilog = KEYS


def _serve_arguments(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("model", metavar="MODEL", help="Hugging Face directory")
    serve.add_argument("--name", help="what clients call the model (default: the directory's name)")
    serve.add_argument("--host", default="127.0.0.1", help="address; one that is not loopback needs a key")
    serve.add_argument("--port", type=_integer(0, 65535), default=8000)
    serve.add_argument(
        "--api_key", metavar="KEY", help="what clients must send (default: the environment's ROLLTREE_API_KEY)"
    )
    serve.add_argument(
        "--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"], help="(default bfloat16)"
    )
    serve.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    serve.add_argument(
        "--kv_tokens", type=_integer(1, 2**31 - 1), default=65536, help="capacity of the KV cache (default 65536)"
    )
    serve.add_argument(
        "--batch_invariant", action="store_true", help="log-probs with the same bits whatever is served beside them"
    )
    serve.add_argument("--tinker", action="store_true", help="also train adapters for clients of Tinker's API")
    serve.add_argument(
        "--tinker_dir",
        type=Path,
        metavar="DIR",
        default=Path("rolltree-tinker"),
        help="where --tinker keeps saved states (default rolltree-tinker)",
    )
    serve.add_argument("--tinker_full", action="store_true", help="train all weights of one model, not adapters")


def _report_arguments(report: argparse.ArgumentParser) -> None:
    report.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+")
    report.add_argument(
        "--out", type=Path, metavar="FILE", help="where the page on several runs goes (default comparison.html)"
    )
    report.add_argument(
        "--watch", action="store_true", help="serve the page on a run to this machine, renewed while the run goes on"
    )
    report.add_argument("--port", type=int, default=0, help="of --watch (default: any that is free)")


def _kernels_arguments(kernels: argparse.ArgumentParser) -> None:
    kernels.add_argument("action", choices=["build"])
    kernels.add_argument(
        "config", metavar="CONFIG", type=Path, help="TOML file, or a Hugging Face directory for GRPO's"
    )
    kernels.add_argument("--arch", required=True, choices=["90a", "100a"], help="Hopper or Blackwell")
    kernels.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="of a directory (bfloat16)")
    kernels.epilog = KEYS


def _methods_arguments(methods: argparse.ArgumentParser) -> None:
    methods.add_argument(
        "name", metavar="NAME", nargs="?", help="show one of them: formula, source, what is inferred, and the recipe"
    )
    methods.add_argument("--papers", action="store_true", help="list papers, each with its recipe")


def _integer(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or len(text) > 20 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"it must be an integer from {least} to {most}, not '{text[:40]}'")
        return int(text)

    return parse


def _train(args: argparse.Namespace, overrides: list[str]) -> int:
    from .stages import load_stages

    try:
        configs = load_stages(args.config, overrides)
        if len(configs) > 1 and args.replay is not None:
            raise UserError("--replay is for a run without stages; give the config.toml of one of its runs.")
        if args.dry_run:
            return _dry_run(configs, check_data=args.check_data)
    except RefusedError as error:
        for refusal in error.refusals if args.dry_run else ():
            print(f"refused            {refusal}.")
        raise
    from .assembly.run import check_stages, is_finished

    several = len(configs) > 1

    check_stages(configs, resume=args.resume)
    for number, config in enumerate(configs, start=1):
        if several:
            print(f"Stage {number} of {len(configs)}: {config.name}")
            if args.resume and is_finished(config):
                print("It has finished already.")
                continue
        _run(args, config, several)
    return 0


def _dry_run(configs: Sequence[TrainConfig], *, check_data: bool) -> int:
    from .config import resolved_toml
    from .dry_run import plan_lines

    for number, config in enumerate(configs):
        print(resolved_toml(config))
        planned = config if number == 0 else config.model_copy(update={"model": configs[0].model})
        if number:
            print(f"# it begins with {config.model.path}, made by the stage before; planned with {planned.model.path}")
        print("\n".join(plan_lines(planned, check_data=check_data)))
    return 0


def _run(args: argparse.Namespace, config: TrainConfig, of_several: bool) -> None:
    """Run one training; a stage of several begins anew where there is nothing to resume."""
    from ..freed_memory import keep_freed_memory
    from ..record.directory import holds_a_run
    from .assembly.run import build
    from .console import Console

    _quiet_transformers()
    keep_freed_memory()
    resume = args.resume and (not of_several or holds_a_run(config.run_dir))
    with Console() as console:
        summary = build(config, console=console, resume=resume, replay=args.replay, check_data=args.check_data).run()
        console.phase("writing the report")
        if all(importlib.util.find_spec(name) for name in EXTRAS["report"]):
            from .report import write_report

            report = str(write_report(config.run_dir))
        else:
            report = "not written; `pip install 'rolltree[report]'`, then `rolltree report " + f"{config.run_dir}`"
        shown = config.run_dir / "config.toml" if of_several else args.config
        program = sys.argv[0] if Path(sys.argv[0]).name == "rolltree" else "rolltree"
        lines = [f"{summary.steps} steps in {summary.seconds / 60:.1f} minutes."]
        if summary.accuracy_before is not None and summary.accuracy_after is not None:
            gain = 100 * (summary.accuracy_after - summary.accuracy_before)
            lines.append(
                f"Held-out accuracy on {summary.problems} problems: {100 * summary.accuracy_before:.1f} % before, "
                f"{100 * summary.accuracy_after:.1f} % after ({gain:+.1f} points)."
            )
        lines += filter(None, [summary.tokens, *summary.failures])
        lines += [
            f"Report: {report}",
            f"Model:  {summary.export} (a Hugging Face directory)",
            f"Next:   {program} rollout {shown} --model.path {summary.export}   to see what it answers,",
            f"        {program} train {shown} --seed {config.seed + 1} --name {_next_name(config)}   again",
        ]
        console.finish(lines)


def _quiet_transformers() -> None:
    """Turn off the progress bars and warnings of Transformers, which would break up the run's own progress display."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def _next_name(config: TrainConfig) -> str:
    stem, _, last = config.name.rpartition("_seed")
    return f"{stem if stem and last.isdigit() else config.name}_seed{config.seed + 1}"


def _rollout(args: argparse.Namespace, overrides: list[str]) -> int:
    for option, file in (("--out", args.out), ("--record", args.record)):
        if file is not None and file.exists():
            raise UserError(f"'{file}' exists already; choose another {option}.")
    from .config import load_config
    from .show import sample_and_show

    _quiet_transformers()
    sample_and_show(load_config(args.config, overrides), args.prompts, args.out, args.record)
    return 0


def _plan(args: argparse.Namespace, overrides: list[str]) -> int:
    from .config import load_config
    from .plan import make_plan

    _quiet_transformers()
    plan = make_plan(load_config(args.config, overrides), args.gpus, args.device, args.rates)
    print(plan.as_json() if args.json else "\n".join(plan.lines()))
    return 0


def _serve(args: argparse.Namespace, _: list[str]) -> int:
    if any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn")):
        raise UserError("serve needs fastapi and uvicorn; install rolltree[serve].")
    if args.tinker and any(importlib.util.find_spec(name) is None for name in ("tinker", "peft")):
        raise UserError("serve --tinker needs tinker and peft; install rolltree[tinker].")
    from .server.serve import serve

    _quiet_transformers()
    serve(
        args.model,
        name=args.name,
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        dtype=args.dtype,
        device=args.device,
        kv_tokens=args.kv_tokens,
        debug=args.debug,
        batch_invariant=args.batch_invariant,
        tinker=args.tinker_dir if args.tinker else None,
        tinker_full=args.tinker_full,
    )
    return 0


def _report(args: argparse.Namespace, _: list[str]) -> int:
    from .report import write_comparison, write_report

    if args.watch:
        if len(args.run_dirs) > 1 or args.out is not None:
            raise UserError("--watch shows one run and writes no page; give one directory, and no --out.")
        from .report.watch import watch

        watch(args.run_dirs[0], args.port)
        return 0
    if len(args.run_dirs) > 1:
        print(write_comparison(args.run_dirs, args.out or Path("comparison.html")))
        return 0
    if args.out is not None:
        raise UserError("The report of one run is written to its directory; --out is for the page on several.")
    print(write_report(args.run_dirs[0]))
    return 0


def _kernels(args: argparse.Namespace, overrides: list[str]) -> int:
    from .compile import compile_kernels, job_of

    compile_kernels(job_of(args.config, overrides, args.dtype), args.arch)
    return 0


def _methods(args: argparse.Namespace, _: list[str]) -> int:
    from .methods import about, method_lines, paper_lines

    if args.name is not None and args.papers:
        raise UserError("`rolltree methods` takes a name or --papers, not both.")
    print("\n".join(paper_lines() if args.papers else method_lines() if args.name is None else about(args.name)))
    return 0


def _doctor(_: argparse.Namespace, __: list[str]) -> int:
    from .doctor import run

    return run()


if __name__ == "__main__":
    sys.exit(main())
