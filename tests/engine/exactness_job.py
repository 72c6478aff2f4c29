"""``python -m tests.engine.exactness_job MODEL``: recorded against trained log-probs of a job, as a table.

Three programs sample: flat, treepo, and turns that are answered with given tokens, as environments and tools do. The
log-probs of their trees are computed in each form that training has, and compared with those that the sampler
recorded. With ``--cost`` rollouts and steps of `rolltree bench` are timed with `model.batch_invariant` and without, in
turns; MODEL may then be ``small``, the model of these benchmarks.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from rolltree.bench import workloads
from rolltree.bench.runs import rollout, tree_step
from rolltree.engine import EngineConfig, NativeEngine, SamplingParams, TokenTree, fuse_layers, load_model, pack
from rolltree.engine.batches.batch import TreeBatch
from rolltree.engine.model.decoder import unchecked_logprob
from rolltree.engine.model.invariant.install import make_invariant
from rolltree.engine.programs import Call, Fork, Given, RolloutProgram, TreePO

PROMPTS, LENGTH, ROWS, TURNS = 2, 60, 300, 4
"""Prompts and their tokens, rows of a small micro-batch or piece, and turns of a conversation."""
FORMS = ("tree", "micro-batches", "pieces", "one by one", "padded")


class Answered(RolloutProgram):
    """Turns of equal length; a function in a thread answers each but the last."""

    def __init__(self, tokens: int) -> None:
        self.segment_tokens = max(tokens // TURNS, 1)

    def decide(self, group: Any, finished: Any) -> Iterator[Any]:
        for segment in finished:
            if segment.status is None:
                yield Call(segment.branch, sum, (segment.token_ids.tolist(),))

    def returned(self, group: Any, branch: Any, result: Any) -> Iterator[Any]:
        yield Fork(branch, append=Given([result % 90, 5, 6]))


class Row(NamedTuple):
    program: str
    form: str
    tokens: int  # that were compared
    largest: float  # difference between recorded and trained log-probs
    seconds: float  # of the process


def programs(tokens: int) -> dict[str, Any]:
    return {
        "flat": "flat",
        "treepo": TreePO(segment_tokens=max(tokens // 8, 1), max_depth=8, branch=2, init=2),
        "environment": Answered(tokens),
    }


def sampled(model: Any, program: Any, responses: int, tokens: int) -> list[TokenTree]:
    size = min(model.config.vocab_size, 1 << 15)
    prompts = np.random.default_rng(0).integers(size, size=(PROMPTS, LENGTH)).tolist()
    params = SamplingParams(n=responses // PROMPTS, max_new_tokens=tokens, ignore_eos=True, seed=1)
    return NativeEngine(model, config=EngineConfig(kv_tokens=1 << 15)).generate(prompts, params, program)


Part = tuple[TreeBatch, Sequence[int], Sequence[Any]]  # a batch, and the tree and the leaves of each of its own


def parts(trees: Sequence[TokenTree], form: str) -> Iterator[Part]:
    if form == "one by one":
        for index, tree in enumerate(trees):
            for leaf in range(tree.num_leaves):
                (batch,) = pack([tree.chain(leaf)], max_tokens=1 << 20)
                yield batch, [index], [[leaf]]
        return
    most = {"tree": 1 << 20, "padded": 3 * ROWS}.get(form, ROWS)
    for batch in pack(trees, max_tokens=most, in_pieces=form == "pieces", flat=form == "padded"):
        yield batch, batch.tree_index, batch.leaf_index


def compared(model: Any, trees: Sequence[TokenTree], form: str) -> tuple[int, float]:
    """Return how many log-probs were compared, and their largest difference."""
    count, largest = 0, 0.0
    for batch, indices, numbers in parts(trees, form):
        with torch.no_grad():
            leaves = batch.to_leaves(unchecked_logprob(model, batch).logprob)
        for index, which, values in zip(indices, numbers, leaves, strict=True):
            for leaf, own in zip(which, values, strict=True):
                recorded = trees[index].behaviour_logprob[trees[index].response_rows(int(leaf))]
                drawn = ~np.isnan(recorded)  # the others were given
                count += int(drawn.sum())
                largest = max(largest, float(np.abs(recorded - own.numpy())[drawn].max(initial=0)))
    return count, largest


def rows(model: Any, responses: int, tokens: int, names: Sequence[str] = ()) -> Iterator[Row]:
    for name, program in programs(tokens).items():
        if names and name not in names:
            continue
        began = time.process_time()
        trees = sampled(model, program, responses, tokens)
        yield Row(name, "rollouts", sum(tree.logical_tokens for tree in trees), 0.0, time.process_time() - began)
        for form in FORMS:
            began = time.process_time()
            count, largest = compared(model, trees, form)
            yield Row(name, form, count, largest, time.process_time() - began)


def calls(model: Any, small: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the rollouts and steps of the README and of docs/benchmarks.md that do not take minutes."""
    vocabulary = model.config.vocab_size
    for count, prompt, group, new in [(4, 512, 16, 128)] if small else [(2, 128, 8, 128), (2, 512, 16, 64)]:
        prompts = np.random.default_rng(0).integers(vocabulary, size=(count, prompt)).tolist()
        inputs = rollout.Inputs(model, prompts, group, new, ())
        yield f"{count} x ({prompt} + {group}x{new}), rollouts", rollout.native(inputs)["generate"]
    for prompt, group, new in [(1024, 16, 128), (32, 4, 512)] if small else [(512, 16, 64), (128, 8, 128)]:
        inputs_of_step = tree_step.Inputs(model, workloads.group(prompt, new, group))
        with mock.patch.object(tree_step, "own_model", lambda x, attention: x.model):
            yield f"{prompt} + {group}x{new}, step", tree_step.tree(inputs_of_step)["step"]


def cost(path: str, dtype: torch.dtype, rounds: int) -> Iterator[str]:
    """Yield a line for each call: seconds without and with the mode, and their ratio: median, least and most."""
    small = path == "small"
    if small:
        torch.manual_seed(0)
        source: Any = rollout.make_model(torch.device("cpu"), small=True).to(dtype)
        source.set_attn_implementation("rolltree")
        models = [fuse_layers(source), make_invariant(copy.deepcopy(source))]
    else:
        models = [load_model(path, dtype=dtype, batch_invariant=exact) for exact in (False, True)]
    for (name, plain), (_, exact) in zip(*(list(calls(model, small)) for model in models), strict=True):
        times: list[tuple[float, float]] = []
        for number in range(rounds + 1):
            pair = {}
            for call in (plain, exact) if number % 2 else (exact, plain):
                for model in models:
                    model.train("step" in name)
                began = time.perf_counter()
                call()
                pair[call] = time.perf_counter() - began
            if number:  # the first warms up
                times.append((pair[plain], pair[exact]))
        ratios = sorted(b / a for a, b in times)
        without, with_it = (float(np.median(column)) for column in zip(*times, strict=True))
        spread = f"{float(np.median(ratios)):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        yield f"{str(dtype)[6:]:<10}{name:<36}{without:>8.2f} s{with_it:>8.2f} s   {spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("programs", nargs="*")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--without", action="store_true", help="leave model.batch_invariant out")
    parser.add_argument("--cost", type=int, metavar="ROUNDS", help="time this many rounds instead")
    given = parser.parse_intermixed_args()
    torch.set_num_threads(given.threads)
    if given.cost:
        for line in cost(given.model, getattr(torch, given.dtype), given.cost):
            print(line, flush=True)
        return
    model = load_model(given.model, dtype=getattr(torch, given.dtype), batch_invariant=not given.without)
    for row in rows(model, given.responses, given.tokens, given.programs):
        left, right = f"{given.dtype:<10}{row.program:<13}{row.form:<15}", f"{row.tokens:>8}{row.largest:>12.2g}"
        print(f"{left}{right}{row.seconds:>8.1f} s", flush=True)


if __name__ == "__main__":
    main()
