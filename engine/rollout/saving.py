"""An aborted request as plain values: its tokens with versions and log-probs, its branches, its program's state."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..programs import RolloutProgram
from .branch import Branch, Node, Request

GIVEN = ("tokenizer", "end_token_ids", "context", "verify")
"""Attributes of a program that the engine or the run sets."""


def request_state(request: Request, program: RolloutProgram) -> dict[str, Any]:
    """Return the state that `restore_request` needs: arrays and Python values, the program's own attributes unchanged.

    Args:
        request: started and aborted; its program repeats the calls that were under way.
        program: the one from which every request gets a copy, in its initial state.
    """
    branches = {"leaves": request.leaves, "sampling": request.sampling, "resting": request.resting}
    every = [branch for by_id in branches.values() for branch in by_id.values()]
    nodes = {id(node): node for branch in every for node in branch.node.path()}
    ordered = sorted(nodes.values(), key=lambda node: (node.start, len(list(node.path()))))
    index = {id(node): i for i, node in enumerate(ordered)}
    same = vars(program)

    def is_set_anew(name: str, value: Any) -> bool:
        if name in GIVEN or value is program.verify:
            return True
        return name in same and (same[name] is value or isinstance(value, partial))  # copies have partials of their own

    attributes = {name: v for name, v in vars(request.program).items() if not is_set_anew(name, v)}
    return {
        "forks": request.forks,
        "errors": dict(request.errors),
        "kept": list(request.kept),
        "orders": request.branches_made,
        "calls": [key for key, _ in request.calls],
        "away": {branch.id: branch.away for branch in every if branch.away is not None},
        "program": request.program.state_dict(attributes),
        "nodes": [
            (
                -1 if n.parent is None else index[id(n.parent)],
                n.start,
                n.records,
                n.origin,
                n.sealed,
                n.temperature,
                n.trained,
                n.routes,
                n.role,
                n.model,
            )
            for n in ordered
        ],
        **{where: [_branch_state(b, index[id(b.node)]) for b in by_id.values()] for where, by_id in branches.items()},
    }


def _branch_state(branch: Branch, node: int) -> tuple[Any, ...]:
    order = branch.order & 0xFFFFFFFF  # within its request
    return (
        branch.id, node, branch.seed, order, branch.boundaries, branch.status, branch.length, branch.rewinds,
        branch.saved, branch.reward, branch.temperature, branch.trained, branch.role, branch.turn_rewards,
    )  # fmt: skip


def restore_request(request: Request, state: dict[str, Any]) -> None:
    """Load the result of `request_state` into a fresh request for the same prompt; `submit` then continues it."""
    request.started = True
    request.forks, request.kept, request.errors = state["forks"], state["kept"], state["errors"]
    request.branches_made = state["orders"]
    request.lost_calls = state["calls"]
    request.program.load_state_dict(state["program"])
    nodes: list[Node] = []
    for parent, *facts in state["nodes"]:
        nodes.append(Node(None if parent < 0 else nodes[parent], *facts))
    for where in ("leaves", "sampling", "resting"):
        place: dict[Any, Branch] = getattr(request, where)
        place.clear()  # an engine may have begun the request before it was aborted
        for key, node, seed, order, boundaries, status, length, rewinds, saved, reward, *facts, turns in state[where]:
            branch = Branch(request, key, nodes[node], seed, request.number << 32 | order, boundaries, *facts)
            branch.status, branch.length, branch.rewinds, branch.saved = status, length, rewinds, saved
            branch.reward, branch.turn_rewards = reward, turns
            branch.away = state.get("away", {}).get(key)
            place[key] = branch
