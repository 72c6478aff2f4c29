"""Puts the page together and writes it in one move."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.offline
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...errors import RunError
from . import figures
from .run_data import RunData, read_run
from .trees import explorer_data, tokenizer_texts

TEMPLATES = Path(__file__).parent


def write_report(run_dir: str | Path) -> Path:
    """Write ``<run_dir>/report.html`` and return its path. What the run did not record is named on the page.

    Raises:
        UserError: ``run_dir`` is not the directory of a run.
        RunError: the page cannot be written.
    """
    run = read_run(Path(run_dir))
    target = run.run_dir / "report.html"
    page = _render(run)
    partial = target.with_name(".report.html.partial")
    try:
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunError(f"The report '{target}' cannot be written: {error.strerror}.") from error
    return target


def _render(run: RunData) -> str:
    missing = list(run.missing)
    curves = [(curve, figures.curve_figure(run, curve)) for curve in figures.CURVES]
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
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    plotted = accuracy is not None or stacked is not None or any(figure is not None for _, figure in curves)
    return environment.get_template("report.html.j2").render(
        name=run.config.get("name") or run.run_dir.resolve().name,
        subtitle=_subtitle(run),
        config_text=run.config_text,
        missing=missing,
        cards=figures.headline(run),
        accuracy=_html(accuracy),
        curves=[(curve, _html(figure)) for curve, figure in curves if figure is not None],
        stacked=_html(stacked),
        account=figures.account(run),
        explorer_note=explorer["note"],
        tree_count=len(explorer["trees"]),
        trees_json=_script_json(explorer["trees"]),
        columns_json=_script_json(explorer["columns"]),
        plotly_js=Markup(plotly.offline.get_plotlyjs()) if plotted else "",
    )


def _subtitle(run: RunData) -> str:
    """'grpo on chain_sum, treepo rollouts of 8, model models/small', as far as known."""
    config = run.config
    tasks = ", ".join(str(task.get("name")) for task in config.get("data", {}).get("tasks", ()))
    source = tasks or config.get("data", {}).get("path")
    rollout, objective = config.get("rollout", {}), config.get("algorithm", {}).get("objective")
    parts = [f"{objective} on {source}" if objective and source else source]
    parts.append(f"{rollout['program']} rollouts of {rollout.get('n')}" if rollout.get("program") else None)
    parts.append(f"model {config['model']['path']}" if config.get("model", {}).get("path") else None)
    return ", ".join(part for part in parts if part)


def _tokenizers(run: RunData) -> list[Path]:
    """Where the tokenizer of this run may be, best first."""
    places = [run.run_dir / "export", *sorted((run.run_dir / "checkpoints").glob("step_*"), reverse=True)]
    if path := run.config.get("model", {}).get("path"):
        places.append(Path(path))
    return [place / "tokenizer.json" for place in places]


def _html(figure: go.Figure | None) -> Markup:
    if figure is None:
        return Markup("")
    options = {"displayModeBar": False, "responsive": True}
    return Markup(figure.to_html(full_html=False, include_plotlyjs=False, config=options))


def _script_json(value: Any) -> Markup:
    """JSON that may stand inside a script element, whatever text the model wrote."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(
        text.replace("&", "\\u0026")
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )
