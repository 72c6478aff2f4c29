"""Templates, embedded plots and data of a page, and its atomic writing."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import plotly.offline
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from ...errors import RunError
from .figures import Figure

TEMPLATES = Path(__file__).parent


@cache
def template(name: str) -> Template:
    """Load a template of this folder; an undefined variable in it is an error."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def html(figure: Figure, name: str) -> Markup:
    """Return the HTML element of a plot, with the id ``name``; the script `plots.html.j2` of the page draws it."""
    return Markup(
        f'<div id="{name}" class="plotly-graph-div" style="height:{figure["layout"]["height"]}px"></div>'
        f'<script type="application/json" id="{name}-figure">{script_json(figure)}</script>'
    )


def plotly_js() -> Markup:
    return Markup(plotly.offline.get_plotlyjs())


def script_json(value: Any) -> Markup:
    """Encode as JSON that is safe inside a script element, whatever text the model wrote."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(
        text.replace("&", "\\u0026")
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )


def write_page(target: Path, page: str) -> None:
    """Write ``page`` to ``target``, completely or not at all.

    Raises:
        RunError: it cannot be written; no partial file remains.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunError(f"The report '{target}' cannot be written: {error.strerror}.") from error
