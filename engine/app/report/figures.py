"""The report's numbers and plots, from a run's metrics; the plots suit light and dark pages.

A plot is a dictionary of plotly.js's names; plotly's Python classes check each value of it, which takes longer than all
the rest of a page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from ...record.spent import Spent, spent
from .run_data import RunData

BLUE, ORANGE, GREEN, GREY = "#3b82f6", "#f59e0b", "#10b981", "#888888"

ACCOUNT: tuple[tuple[str, str, str], ...] = (
    ("prompts", "drawing prompts", "#1e3a8a"),
    ("gen", "sampling rollouts", "#3b82f6"),
    ("reward", "waiting for rewards", "#f59e0b"),
    ("pack", "packing trees", "#a78bfa"),
    ("old_log_prob", "old log-probabilities", "#14b8a6"),
    ("forward_backward", "forward and backward", "#ef4444"),
    ("head", "head and loss", "#f97316"),
    ("optimizer", "optimiser", "#991b1b"),
    ("update_critic", "the critic's update", "#a16207"),
    ("sync", "new weights for the sampler", "#64748b"),
    ("dump_rollout_generations", "writing rollouts", "#0ea5e9"),
    ("eval", "evaluation", "#10b981"),
    ("checkpoint", "checkpoints", "#ec4899"),
    ("other", "everything else", "#9ca3af"),
)
"""The parts of ``timing_s/step`` in stacking order: metric, label, colour."""
BARS = 100
"""Most steps whose parts are bars; those of 1,000 steps take a browser half a second, and areas 20 ms."""


class Curve(NamedTuple):
    """One small plot; each line is ``(metric key, name, colour)`` and is drawn if it was recorded."""

    title: str
    caption: str
    lines: tuple[tuple[str, str, str], ...]
    percent: bool = False


CURVES: tuple[Curve, ...] = (
    Curve("Reward", "Mean over all responses of a step.", (("reward/mean", "reward", BLUE),)),
    Curve("Entropy", "Mean over sampled tokens, in nats; a fall to zero means exploration has ended.",
          (("actor/entropy", "entropy", BLUE),)),
    Curve("Clipped tokens", "Share of tokens whose ratio is outside the clip range.",
          (("actor/pg_clipfrac", "clipped", BLUE),), percent=True),
    Curve("Gradient norm", "Before clipping.", (("actor/grad_norm", "norm", BLUE),)),
    Curve("Response length", "Mean tokens of a response.", (("response_length/mean", "tokens", BLUE),)),
    Curve("Cut responses", "Share of responses that reached the length limit.",
          (("response_length/clip_ratio", "cut", ORANGE),), percent=True),
    Curve("Token ratio", "Tokens of all root-to-leaf paths divided by unique tokens: the saving of the tree.",
          (("tree/token_ratio", "logical / unique", GREEN),)),
    Curve("Throughput", "Tokens a second: on all paths, and unique ones, which alone are computed.",
          (("perf/throughput", "logical", BLUE), ("perf/unique_tokens_per_s", "unique", GREEN))),
    Curve("Compute", "FLOP of a step: to sample, to score, to train and to evaluate.",
          (("perf/flop_sampled", "sampled", BLUE), ("perf/flop_scored", "scored", GREY),
           ("perf/flop_trained", "trained", ORANGE), ("perf/flop_evaluated", "evaluated", GREEN))),
    Curve("Sampler against trainer", "Mean difference of the probabilities both give to sampled tokens; zero is right.",
          (("training/rollout_probs_diff_mean", "difference", ORANGE),)),
    Curve("Groups without signal", "Groups of a step whose rewards are all equal; they are left out of the update.",
          (("filter/zero_variance_groups", "groups", ORANGE),)),
)  # fmt: skip

OF_AGENTS: tuple[Curve, ...] = (
    Curve("Calls of agents", "Mean calls an episode, and the sequences that they make: 1 where each call appends.",
          (("agent/calls", "calls", BLUE), ("agent/branches", "sequences", GREEN))),
    Curve("Shared by calls", "Tokens of all calls, each with its whole prompt, over tokens of the trees.",
          (("agent/shared_ratio", "of calls / of trees", GREEN),)),
    Curve("Time of tools", "Mean seconds of an episode in which its agent waited for no call.",
          (("agent/tool_s", "seconds", ORANGE),)),
    Curve("Waiting for agents", "Seconds of a step without a call to sample: agents start, or work themselves.",
          (("perf/idle/agents_start", "start", GREY), ("perf/idle/agents_tools", "tools", ORANGE))),
)  # fmt: skip
"""Plots of runs of agents alone."""


def headline(run: RunData) -> list[dict[str, str]]:
    """Return the cards at the top, ``{label, value, note}`` each, without those that were not recorded."""
    cards = []
    steps, accuracy = run.series("eval/accuracy")
    problems = run.config.get("evaluation", {}).get("problems")
    held_out = f"{problems} held-out problems" if problems else "held-out problems"
    if accuracy:
        cards.append(_card("accuracy before", f"{100 * accuracy[0]:.1f} %", f"{held_out}, step {steps[0]}"))
    if len(accuracy) > 1:
        gain = 100 * (accuracy[-1] - accuracy[0])
        cards.append(_card("accuracy after", f"{100 * accuracy[-1]:.1f} %", f"{gain:+.1f} points, step {steps[-1]}"))
    if run.rows:
        last, planned = int(run.rows[-1]["step"]), run.config.get("trainer", {}).get("steps")
        cards.append(_card("steps", str(last), f"of {planned}" if planned else ""))
    if total := run.total("timing_s/step"):
        cards.append(_card("time", duration(total), f"{total / training_steps(run):.2f} s a step"))
    if flop := _last(run, "perf/flop_so_far"):
        evaluated = run.total("perf/flop_evaluated")
        cards.append(_card("FLOP", short(flop), f"and {short(evaluated)} to evaluate" if evaluated else ""))
    for target in run.config.get("evaluation", {}).get("targets", ()):
        name = f"eval/target/{target:g}"
        if flop := _last(run, f"{name}/flop"):
            tokens, seconds = _last(run, f"{name}/tokens") or 0.0, _last(run, f"{name}/seconds") or 0.0
            cards.append(
                _card(f"FLOP to {100 * target:g} %", short(flop), f"{short(tokens)} tokens, {duration(seconds)}")
            )
    if tokens := logical_tokens(run):
        cards.append(_card("tokens", short(tokens), f"on all paths; {short(tokens / total)} a second" if total else ""))
    _, ratio = run.series("tree/token_ratio")
    if ratio:
        cards.append(_card("token ratio", f"{math.fsum(ratio) / len(ratio):.2f}x", "logical over unique, mean"))
    return cards


def _last(run: RunData, key: str) -> float | None:
    values = run.series(key)[1]
    return values[-1] if values else None


def logical_tokens(run: RunData) -> float:
    """Return the logical tokens of the whole run: the sum of throughput times time over the steps."""
    rows = [r for r in run.rows if "perf/throughput" in r and "timing_s/step" in r]
    return math.fsum(r["perf/throughput"] * r["timing_s/step"] for r in rows)


def training_steps(run: RunData) -> int:
    """Return the number of steps whose time was recorded, at least 1; row 0, the first evaluation, is not a step."""
    return max(1, sum(step > 0 for step in run.series("timing_s/step")[0]))


def account(run: RunData) -> list[dict[str, str]]:
    """Return the table of step time, ``{name, colour, total, share, mean}`` for each part; the last row is the step.

    The rest of ``timing_s/step`` that no part covers has its own row, so that the column always adds up.
    """
    total = run.total("timing_s/step")
    if not total:
        return []
    parts = [(name, colour, run.total(f"timing_s/{key}")) for key, name, colour in ACCOUNT]
    open_seconds = total - math.fsum(seconds for _, _, seconds in parts)
    if abs(open_seconds) > 1e-3 * total:
        parts.append(("not accounted for", GREY, open_seconds))
    parts.append(("the step", "", total))
    return [
        {
            "name": name,
            "colour": colour,
            "total": f"{seconds:.1f}",
            "share": f"{100 * seconds / total:.1f}",
            "mean": f"{seconds / training_steps(run):.3f}",
        }
        for name, colour, seconds in parts
        if seconds or not colour
    ]


Trace = dict[str, Any]
"""A line or the bars of a plot."""
Figure = dict[str, Any]
"""A plot: its traces as ``data``, and its ``layout``."""


def accuracy_traces(run: RunData) -> list[Trace]:
    """Return held-out accuracy with its 95 % interval (normal approximation, ``evaluation.problems`` draws)."""
    steps, accuracy = run.series("eval/accuracy")
    if not accuracy:
        return []
    problems = run.config.get("evaluation", {}).get("problems")
    interval = [1.96 * math.sqrt(a * (1 - a) / problems) for a in accuracy] if problems else None
    line: Trace = {
        "type": "scatter", "x": steps, "y": accuracy, "mode": "lines+markers", "line": {"color": GREEN, "width": 2},
        "marker": {"size": 8}, "hovertemplate": "%{x}: %{y:.1%}<extra></extra>",
    }  # fmt: skip
    return [line | ({"error_y": {"array": interval, "thickness": 1, "width": 3}} if interval else {})]


def accuracy_menu(run: RunData) -> dict[str, Any]:
    """Return the buttons that draw accuracy over steps, or over what the run had spent without evaluations: FLOP,
    sampled tokens, seconds."""
    steps, _ = run.series("eval/accuracy")
    after = {int(row["step"]): then for row, then in zip(run.rows, spent(run.rows), strict=True)}
    over = {"step": steps} | {name: [getattr(after[s], name) for s in steps] for name in Spent._fields}
    buttons = [
        {"label": name, "method": "update", "args": [{"x": [xs]}, {"xaxis.title.text": name}]}
        for name, xs in over.items()
        if any(xs)
    ]
    return {
        "type": "buttons",
        "direction": "right",
        "x": 0,
        "xanchor": "left",
        "y": 1.04,
        "yanchor": "bottom",
        "buttons": buttons,
    }


def is_recorded(run: RunData, curve: Curve) -> bool:
    """Return whether there is a value of the curve."""
    return any(key in row for key, _, _ in curve.lines for row in run.rows)


def curve_traces(run: RunData, curve: Curve) -> list[Trace]:
    """Return the curve's lines that were recorded, faint under a running mean if there is one."""
    traces: list[Trace] = []
    drawn = [(name, colour, *run.series(key)) for key, name, colour in curve.lines]
    for name, colour, steps, values in drawn:
        if not values:
            continue
        smooth = running_mean(values)
        hover = f"step %{{x}}: %{{y:{'.1%' if curve.percent else '.4~g'}}}<extra>{name}</extra>"
        line = {"type": "scatter", "x": steps, "name": name}
        mode = "lines" if len(values) > 1 else "markers"
        plain = {"color": colour, "width": 1.5 if smooth is None else 1}
        faint = {"opacity": 1 if smooth is None else 0.35, "showlegend": smooth is None}
        traces.append({**line, "y": values, "mode": mode, "hovertemplate": hover, "line": plain, **faint})
        if smooth is not None:
            thick = {"color": colour, "width": 2}
            traces.append({**line, "y": smooth, "mode": "lines", "line": thick, "hoverinfo": "skip"})
    return traces


def account_traces(run: RunData) -> list[Trace]:
    """Return the seconds of each part, step by step: bars, or areas of a run of more than `BARS` steps."""
    rows = [r for r in run.rows if "timing_s/step" in r]
    seconds = {key: [r.get(f"timing_s/{key}", 0.0) for r in rows] for key, *_ in ACCOUNT}
    return [
        {
            "x": [int(r["step"]) for r in rows], "y": seconds[key], "name": name, "hovertemplate": "%{y:.3f} s",
            **(_bars(colour) if len(rows) <= BARS else _area(colour)),
        }
        for key, name, colour in ACCOUNT
        if any(seconds[key])
    ]  # fmt: skip


def _bars(colour: str) -> Trace:
    return {"type": "bar", "marker": {"color": colour, "line": {"width": 0}}}


def _area(colour: str) -> Trace:
    line = {"width": 0, "shape": "hvh", "color": colour}
    return {"type": "scatter", "mode": "lines", "stackgroup": "parts", "line": line, "fillcolor": colour}


def accuracy_figure(run: RunData) -> Figure | None:
    """Plot held-out accuracy, with the buttons of `accuracy_menu`; None if none was recorded."""
    if not (traces := accuracy_traces(run)):
        return None
    layout = {"showlegend": False, "updatemenus": [accuracy_menu(run)]}
    return styled(traces, layout, percent=True, height=340, top=60)


def curve_figure(run: RunData, curve: Curve) -> Figure | None:
    """Plot a curve; None if nothing was recorded."""
    if not (traces := curve_traces(run, curve)):
        return None
    layout = {"showlegend": len({trace["name"] for trace in traces}) > 1}
    return styled(traces, layout, percent=curve.percent, height=210)


def account_figure(run: RunData) -> Figure | None:
    """Plot the seconds of each part, stacked, step by step; None where `account` has no table."""
    if not run.total("timing_s/step"):
        return None
    layout = {"barmode": "stack", "bargap": 0, "hovermode": "x unified"}
    return styled(account_traces(run), layout, percent=False, height=300, title="seconds")


def running_mean(values: Sequence[float]) -> list[float] | None:
    """Return the centred mean over about a twentieth of the run; None for a run too short to need it."""
    reach = len(values) // 40
    if reach < 1:
        return None
    out = []
    for i in range(len(values)):
        window = values[max(0, i - reach) : i + reach + 1]
        out.append(math.fsum(window) / len(window))
    return out


def duration(seconds: float) -> str:
    """Format seconds: 3725 -> '1 h 02 min'; 75 -> '1 min 15 s'; 7.5 -> '7.5 s'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def short(value: float) -> str:
    """Shorten a number: 2_500_000 -> '2.5M'."""
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def _card(label: str, value: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "note": note}


def styled(
    traces: Sequence[Trace], layout: Mapping[str, Any], *, percent: bool, height: int, top: int = 8, title: str = ""
) -> Figure:
    """Return a plot in the style of light and dark pages.

    Args:
        layout: of this plot alone.
        percent: values are shares.
        height: in pixels, as ``top`` is, the margin above it.
        title: of the vertical axis.
    """
    axis = {"gridcolor": "rgba(128,128,128,0.18)", "zerolinecolor": "rgba(128,128,128,0.35)", "automargin": False}
    largest = max(map(abs, chain.from_iterable(trace["y"] for trace in traces)), default=1.0)
    style = {
        "height": height,
        "margin": {"l": 56, "r": 14, "t": top, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": GREY, "size": 12, "family": "system-ui, sans-serif"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        "hoverlabel": {"align": "left"},
        "xaxis": {**axis, "title": {"text": "step", "standoff": 6}, "zeroline": False},
        "yaxis": {
            **axis,
            "title": {"text": title},
            "tickformat": ".2~%" if percent else "",
            "rangemode": "tozero",
            "exponentformat": "SI" if largest >= 1e-3 else "power",
        },
    }
    return {"data": list(traces), "layout": {**style, **layout}}
