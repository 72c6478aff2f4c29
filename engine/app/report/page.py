"""Makes the page on one run and writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import figures
from .run_data import RunData, read_run
from .trees import explorer_data, tokenizer_texts
from .writing import html, plotly_js, script_json, template, write_page

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
    page = _render(run)
    write_page(target, page)
    return target


def _render(run: RunData) -> str:
    missing = list(run.missing)
    of_agents = figures.OF_AGENTS if run.config.get("rollout", {}).get("program") == "agent" else ()
    curves = [(curve, figures.curve_figure(run, curve)) for curve in (*figures.CURVES, *of_agents)]
    accuracy, stacked = figures.accuracy_figure(run), figures.account_figure(run)
    if run.rows:
        absent = [curve.title.lower() for curve, figure in curves if figure is None]
        absent += ["held-out accuracy"] if accuracy is None else []
        absent += ["step time"] if stacked is None else []
        if absent:
            missing.append(f"Not recorded in metrics.jsonl: {', '.join(absent)}.")
    explorer: dict[str, Any] = {"trees": [], "columns": {}, "note": ""}
    if run.rollout_files:
        explorer = explorer_data(run.rollout_files, tokenizer_texts(_tokenizers(run), missing), missing)
    if explorer["note"] and not explorer["trees"]:
        missing.append(explorer["note"])
    plotted = accuracy is not None or stacked is not None or any(figure is not None for _, figure in curves)
    return template("report.html.j2").render(
        name=run.config.get("name") or run.run_dir.resolve().name,
        subtitle=_subtitle(run),
        config_text=run.config_text,
        missing=missing,
        cards=figures.headline(run),
        accuracy=html(accuracy),
        curves=[(curve, html(figure)) for curve, figure in curves if figure is not None],
        stacked=html(stacked),
        account=figures.account(run),
        explorer_note=explorer["note"],
        parted=[tree for tree in reversed(explorer["trees"]) if tree["parting"]][:PARTED],
        tree_count=len(explorer["trees"]),
        trees_json=script_json(explorer["trees"]),
        columns_json=script_json(explorer["columns"]),
        plotly_js=plotly_js() if plotted else "",
    )


def _subtitle(run: RunData) -> str:
    """Return 'grpo on chain_sum, treepo rollouts of 8, model models/small', without the parts that are unknown."""
    config = run.config
    tasks = ", ".join(str(task.get("name")) for task in config.get("data", {}).get("tasks", ()))
    source = tasks or config.get("data", {}).get("path")
    rollout, objective = config.get("rollout", {}), config.get("algorithm", {}).get("objective")
    parts = [f"{objective} on {source}" if objective and source else source]
    parts.append(f"{rollout['program']} rollouts of {rollout.get('n')}" if rollout.get("program") else None)
    parts.append(f"model {config['model']['path']}" if config.get("model", {}).get("path") else None)
    return ", ".join(part for part in parts if part)


def _tokenizers(run: RunData) -> list[Path]:
    """Return the paths at which the run's tokenizer may be, in the order to try them."""
    places = [run.run_dir / "export", *sorted((run.run_dir / "checkpoints").glob("step_*"), reverse=True)]
    if path := run.config.get("model", {}).get("path"):
        places.append(Path(path))
    return [place / "tokenizer.json" for place in places]
