"""The problems of a run whose curriculum estimates success rates: a plot, and tables of problems and of a column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .figures import Figure, Trace, styled
from .run_data import RunData

DRAWN, LISTED = 1000, 200
"""Most problems of the plot and of the table, those tried last."""


def shown(run: RunData) -> dict[str, Any] | None:
    """Return the section's text and tables; None if the run has no estimates, or no problem was tried yet."""
    rows = _newest(run)
    if run.problems is None or not rows:
        return None
    of, by, step = run.problems["of"], run.problems["by"], run.problems["step"]
    curriculum = run.config.get("data", {}).get("curriculum")
    tried = f"{len(rows):,}" if of is None else f"{len(rows):,} of {of:,}"
    return {
        "note": f"Success rates after step {step}, estimated by data.curriculum = '{curriculum}': mean and deviation "
        f"of the posterior. Problems tried: {tried}.",
        "by": by,
        "by_value": [_written(row) for row in run.problems["values"]] if by is not None else [],
        "listed": f"the {min(len(rows), LISTED):,} problems that were tried last",
        "rows": [_written(row) for row in rows[:LISTED]],
    }


def traces(run: RunData) -> list[Trace]:
    """Return the points of the plot: a problem's estimated success rate and its responses, by the step of the last."""
    rows = _newest(run)[:DRAWN]
    if not rows:
        return []
    return [
        {
            "type": "scatter", "mode": "markers",
            "x": [row["mean"] for row in rows], "y": [row["tries"] for row in rows],
            "text": [_hover(row) for row in rows], "hovertemplate": "%{text}<extra></extra>",
            "marker": {
                "size": 8, "opacity": 0.75, "color": [row["step"] for row in rows], "colorscale": "Viridis",
                "colorbar": {"title": {"text": "last step"}, "thickness": 12},
            },
        }
    ]  # fmt: skip


def figure(run: RunData) -> Figure | None:
    """Plot the problems; None without estimates."""
    points = traces(run)
    if not points:
        return None
    plot = styled(points, {"showlegend": False}, percent=False, height=320, title="responses")
    plot["layout"]["xaxis"] |= {
        "title": {"text": "estimated success rate"},
        "tickformat": ".0%",
        "range": [-0.02, 1.02],
    }
    return plot


def _newest(run: RunData) -> list[dict[str, Any]]:
    rows = [] if run.problems is None else run.problems["problems"]
    return sorted(rows, key=lambda row: (-row["step"], row["mean"]))


def _written(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "success": f"{100 * row['mean']:.0f} ± {100 * row['deviation']:.0f}"}


def _hover(row: Mapping[str, Any]) -> str:
    """Return a few lines on a problem, whose text stands for itself where plotly reads HTML."""
    text = " ".join(row["text"].split())[:80].replace("&", "&amp;").replace("<", "&lt;")
    groups = f"{row['dropped']} of {row['groups']} groups dropped"
    return f"{text}<br>{_written(row)['success']} %, {row['tries']} responses, {groups}"
