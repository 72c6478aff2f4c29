"""Writes build/docs/api.md, the public names of `rolltree.kernels` and `rolltree.engine`: ``make docs``."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "build" / "docs" / "api.md"
IN_FULL = {
    "rolltree.kernels": (
        "linear_logprob", "LogprobOutput", "logprob_from_logits", "policy_loss", "PolicyLossOutput",
        "linear_policy_loss", "linear_terms_loss", "linear_divergence", "linear_topk_divergence", "DivergenceOutput",
        "Objective", "PolicyFields", "pair_loss", "value_loss", "gae",
        "tree_attention", "tree_decode_attention", "sample_tokens", "SampleOutput", "use_backend",
    ),
    "rolltree.engine": (
        "TokenTree", "pack", "TreeBatch", "batch_logprob", "batch_loss", "NativeEngine", "SamplingParams",
        "EngineConfig", "DraftConfig", "Trainer", "Orchestrator", "load_config",
    ),
}  # fmt: skip
"""What a reader meets first; the other names have one line each."""
HEAD = """# API

The public names of `rolltree.kernels` and `rolltree.engine`, as the code declares them: signatures, with shapes as
comments, fields, and docstrings. The names that only some programs need are at the end of each part, with what they
are; `help(name)` has the rest. docs/kernels.md has formulas and schedules, docs/trees.md and docs/rollouts.md examples,
docs/configuration.md the keys of a run.
"""


def reference() -> str:
    """The page."""
    lines = [HEAD]
    for name, in_full in IN_FULL.items():
        module = importlib.import_module(name)
        lines += [f"## {name}", ""]
        for public in in_full:
            lines += [f"### {public}", "", "```text", *declared(getattr(module, public)), "```", ""]
        lines += [f"### More of {name}", "", "| name | what it is |", "|---|---|"]
        for public in sorted(set(module.__all__) - set(in_full), key=str.lower):
            lines.append(f"| `{public}` | {summary(getattr(module, public))} |")
        lines.append("")
    return "\n".join(lines)


def summary(value: Any) -> str:
    """The first paragraph of a docstring, in one line of a table."""
    paragraph = (inspect.getdoc(value) or "").split("\n\n")[0]
    return " ".join(paragraph.split()).replace("|", "\\|").replace("``", "`")


def declared(value: Any) -> list[str]:
    """The source of a function or class without what is private and without bodies."""
    source = textwrap.dedent(inspect.getsource(value)).splitlines()
    (node,) = ast.parse("\n".join(source)).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    lines = [line.rstrip() for line in without_body(node, source)]
    return [line for k, line in enumerate(lines) if line or any(lines[k + 1 : k + 2])]


def without_body(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, source: list[str]) -> list[str]:
    if not isinstance(node, ast.ClassDef):
        return source[node.lineno - 1 : documented_end(node)]
    lines = [*source[first_line(node) - 1 : documented_end(node)], ""]
    for member in node.body:
        if isinstance(member, ast.AnnAssign | ast.Assign):
            target = member.target if isinstance(member, ast.AnnAssign) else member.targets[0]
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                lines += source[member.lineno - 1 : member.end_lineno]
        elif isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and shown(member):
            decorators = [source[d.lineno - 1] for d in member.decorator_list]
            lines += ["", *decorators, *without_body(member, source)]
    return lines


def shown(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return method.name == "__init__" or (not method.name.startswith("_") and ast.get_docstring(method) is not None)


def first_line(node: ast.ClassDef) -> int:
    return min([node.lineno, *(d.lineno for d in node.decorator_list)])


def documented_end(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """The last line of the docstring, or of the signature where there is none."""
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        assert first.end_lineno is not None
        return first.end_lineno
    return max(first.lineno - 1, node.lineno)


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(reference(), encoding="utf-8")
