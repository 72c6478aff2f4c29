"""Makes the page on one run and writes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import figures, problems
from .run_data import RunData, read_run
from .trees import TokenTexts, explorer_data, tokenizer_texts
from .writing import html, plotly_js, script_json, template, write_page

ACCURACY, ACCOUNT, SOLVED = "plot-accuracy", "plot-account", "plot-solved"
PARTED = 12
"""Groups whose parting is shown, the newest ones."""


def write_report(run_dir: str | Path) -> Path:
    """Write ``<run_dir>/report.html`` and return its path. The page lists everything that the run did not record.

    Raises:
        UserError: ``run_dir`` is not the directory of a run.
        RunError: the page cannot be written.
    """
    run = read_run(Path(run_dir))
    target = run.run_dir / "report.html"
    write_page(target, render(run))
    return target


def render(run: RunData) -> str:
    """Return the page on a run."""
    explorer: dict[str, Any] = {"trees": [], "columns": {}, "note": ""}
    if run.rollout_files:
        explorer = explorer_data(run.rollout_files, token_texts(run), run.missing)
    return template("report.html.j2").render(**parts(run, explorer), **drawn(run, plots_of(run)), live=None)


def parts(run: RunData, explorer: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of the template, without the plots; ``explorer`` is of `explorer_data`."""
    missing = list(run.missing)
    if run.rows:
        absent = [curve.title.lower() for curve in curves_of(run).values() if not figures.is_recorded(run, curve)]
        absent += [] if run.series("eval/accuracy")[1] else ["held-out accuracy"]
        absent += [] if any("timing_s/step" in row for row in run.rows) else ["step time"]
        if absent:
            missing.append(f"Not recorded in metrics.jsonl: {', '.join(absent)}.")
    if explorer["note"] and not explorer["trees"]:
        missing.append(explorer["note"])
    return {
        "name": run.config.get("name") or run.run_dir.resolve().name,
        "subtitle": _subtitle(run),
        "config_text": run.config_text,
        "missing": missing,
        "cards": figures.headline(run),
        "account": figures.account(run),
        "problems": problems.shown(run),
        "explorer_note": explorer["note"],
        "parted": [tree for tree in reversed(explorer["trees"]) if tree["parting"]][:PARTED],
        "tree_count": len(explorer["trees"]),
        "trees_json": script_json(explorer["trees"]),
        "columns_json": script_json(explorer["columns"]),
    }


def plots_of(run: RunData) -> dict[str, figures.Figure]:
    """Return the plots of what was recorded, by the ids of their elements."""
    of_curves = {name: figures.curve_figure(run, curve) for name, curve in curves_of(run).items()}
    every = {ACCURACY: figures.accuracy_figure(run), **of_curves, ACCOUNT: figures.account_figure(run)}
    every[SOLVED] = problems.figure(run)
    return {name: figure for name, figure in every.items() if figure is not None}


def drawn(run: RunData, plots: Mapping[str, figures.Figure]) -> dict[str, Any]:
    """Return the variables of the template that are plots; ``plots`` is of `plots_of`, or empty for none."""
    elements = {name: html(figure, name) for name, figure in plots.items()}
    return {
        "accuracy": elements.get(ACCURACY, ""),
        "curves": [(curve, elements[name]) for name, curve in curves_of(run).items() if name in elements],
        "stacked": elements.get(ACCOUNT, ""),
        "solved": elements.get(SOLVED, ""),
        "plotly_js": plotly_js() if elements else "",
    }


def curves_of(run: RunData) -> dict[str, figures.Curve]:
    """Return the curves of a run of this kind, by the ids of their elements."""
    of_agents = run.config.get("rollout", {}).get("program") == "agent"
    curves = (*figures.CURVES, *(figures.OF_AGENTS if of_agents else ()))
    return {f"plot-{number}": curve for number, curve in enumerate(curves)}


def token_texts(run: RunData) -> TokenTexts | None:
    """Return what decodes the run's tokens; None, and a sentence in ``run.missing``, where it cannot be had."""
    places = [run.run_dir / "export", *sorted((run.run_dir / "checkpoints").glob("step_*"), reverse=True)]
    if path := run.config.get("model", {}).get("path"):
        places.append(Path(path))
    return tokenizer_texts([place / "tokenizer.json" for place in places], run.missing)


def _subtitle(run: RunData) -> str:
    """Return 'grpo on chain_sum, treepo rollouts of 8, model models/small', without the parts that are unknown."""
    config = run.config
    tasks = ", ".join(str(task.get("name")) for task in config.get("data", {}).get("tasks", ()))
    source = tasks or config.get("data", {}).get("path")
    rollout, objective = config.get("rollout", {}), config.get("algorithm", {}).get("objective")
    words = [f"{objective} on {source}" if objective and source else source]
    words.append(f"{rollout['program']} rollouts of {rollout.get('n')}" if rollout.get("program") else None)
    words.append(f"model {config['model']['path']}" if config.get("model", {}).get("path") else None)
    return ", ".join(word for word in words if word)
