"""An error in a step of vLLM ends the requests of that step, by a stand-in for vLLM; `test_vllm` has the real one."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rolltree.engine.batches.cost import CostModel
from rolltree.engine.programs import Call, RolloutProgram, make_program
from rolltree.engine.rollout import Request, SamplingParams
from rolltree.engine.rollout.saving import request_state, restore_request

VOCABULARY = 11


class Engine:
    """One token for every request a step: the number of those before it, modulo the vocabulary."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[list[int], Any]] = {}
        self.failing: BaseException | None = None
        self.spoilt: set[int] = set()  # first tokens of prompts whose outputs are not to be read
        self.refused: set[int] = set()
        self.forgotten = 0

    def add_request(self, id_: str, prompt: dict[str, list[int]], params: Any, lora_request: Any = None) -> None:
        tokens = list(prompt["prompt_token_ids"])
        if tokens[0] in self.refused:
            raise ValueError("vLLM takes no such prompt.")
        self.running[id_] = (tokens, SimpleNamespace(left=params.max_tokens))

    def step(self) -> list[Any]:
        if self.failing is not None:
            raise self.failing
        outputs = []
        for id_, (tokens, state) in list(self.running.items()):
            token, state.left = len(tokens) % VOCABULARY, state.left - 1
            tokens.append(token)
            known = None if tokens[0] in self.spoilt else [{token: SimpleNamespace(logprob=-1.0, rank=1)}]
            if not state.left:
                del self.running[id_]
            reason = None if state.left else "length"
            of = SimpleNamespace(token_ids=[token], logprobs=known, stop_reason=None, finish_reason=reason)
            outputs.append(SimpleNamespace(request_id=id_, outputs=[of], finished=not state.left, num_cached_tokens=0))
        return outputs

    def abort_request(self, ids: list[str]) -> None:
        for id_ in ids:
            self.running.pop(id_, None)

    def reset_prefix_cache(self) -> None:
        self.forgotten += 1


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    names = ("vllm", "vllm.inputs", "vllm.sampling_params", "vllm.inputs.engine", "vllm.multimodal.inputs")
    fake, inputs, params, engine, pictures = modules = [ModuleType(name) for name in names]
    engine.MultiModalInput, engine.mm_input = dict, dict  # type: ignore[attr-defined]
    for name in ("MultiModalFieldConfig", "MultiModalKwargsItems", "PlaceholderRange"):
        setattr(pictures, name, object)
    fake.LLM, fake.SamplingParams = object, SimpleNamespace  # type: ignore[attr-defined]
    inputs.TokensPrompt = dict  # type: ignore[attr-defined]
    params.RequestOutputKind = SimpleNamespace(DELTA=0)  # type: ignore[attr-defined]
    for name, module in zip(names, modules, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "rolltree.engine.rollout.vllm.loop", raising=False)
    from rolltree.engine.rollout.vllm.loop import VllmLoop

    model = SimpleNamespace(get_vocab_size=lambda: VOCABULARY, hf_config=SimpleNamespace(model_type="llama"))
    llm = SimpleNamespace(model_config=model, llm_engine=Engine())
    yield VllmLoop(llm, set(), CostModel(1, 1, 1), raw_logprobs=False)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "rolltree.engine.rollout.vllm.loop")


def request(number: int) -> Request:
    params = SamplingParams(n=2, max_new_tokens=4, ignore_eos=True)
    return Request(number, np.array([number], np.int32), 7, params, copy.deepcopy(make_program("flat")))


def finish(loop: Any, *requests: Request) -> None:
    for _ in range(20):
        if all(r.done for r in requests):
            return
        loop.step()
    raise AssertionError("not done")


def test_a_request_whose_outputs_err_fails_alone(loop: Any) -> None:
    one, other = request(1), request(2)
    loop.add(one)
    loop.add(other)
    loop._engine.spoilt.add(1)
    finish(loop, one, other)
    assert isinstance(one.error, ValueError)
    assert one.tree is None
    assert other.tree is not None
    assert [leaf.response for leaf in other.tree.flatten()] == [[1, 2, 3, 4]] * 2
    assert not loop._engine.running
    assert not loop.busy


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_failed_step_fails_what_was_in_hand_and_the_next_request_is_served(loop: Any, error: BaseException) -> None:
    requests = [request(1), request(2)]
    for each in requests:
        loop.add(each)
    loop.step()
    loop._engine.failing = error
    if isinstance(error, Exception):
        assert loop.step() == requests
    else:
        with pytest.raises(KeyboardInterrupt):
            loop.step()
    for each in requests:
        assert str(error) in str(each.error)
    assert (loop.counts["failed_steps"], loop._engine.forgotten) == (1, 1)
    assert not loop._engine.running
    assert not loop._flows
    loop._engine.failing = None
    later = request(3)
    loop.add(later)
    finish(loop, later)
    assert later.tree is not None


def test_what_vllm_does_not_take_leaves_nothing_behind(loop: Any) -> None:
    well, refused = request(1), request(2)
    loop._engine.refused.add(2)
    loop.add(well)
    with pytest.raises(ValueError, match="takes no such prompt"):
        loop.add(refused)
    assert loop.requests == [well]
    finish(loop, well)
    assert well.tree is not None


def resumed(loop: Any, stopped: Request, made: RolloutProgram) -> Request:
    """Keep a request as plain values, and take it up in a fresh one, as a resumed run does."""
    loop.abort(stopped)
    state = request_state(stopped, made)
    again = Request(9, stopped.prompt, stopped.seed, stopped.params, copy.deepcopy(made))
    loop.add(again)
    loop.abort(again)
    restore_request(again, state)
    loop.add(again)
    return again


def test_a_request_goes_on_from_its_plain_values(loop: Any) -> None:
    whole, stopped = request(1), request(1)
    loop.add(whole)
    finish(loop, whole)
    loop.add(stopped)
    loop.step()
    loop.step()
    again = resumed(loop, stopped, make_program("flat"))
    assert sorted(again.sampling) == sorted(stopped.sampling)
    finish(loop, again)
    assert again.tree is not None
    assert whole.tree is not None
    assert [leaf.response for leaf in again.tree.flatten()] == [leaf.response for leaf in whole.tree.flatten()]
    assert not loop._engine.running
    assert not loop.busy


class Asks(RolloutProgram):
    """Calls at the end of its only branch, and again if a checkpoint lost the call."""

    def start(self, group: Any) -> int:
        return 1

    def decide(self, group: Any, finished: Any) -> Any:
        return [Call(report.branch, threading.Event().wait, (60,)) for report in finished]

    def repeated(self, group: Any, branches: Any) -> Any:
        return [Call(branch, str.upper, ("again",)) for branch in branches]

    def returned(self, group: Any, branch: Any, result: Any) -> Any:
        self.result = result
        return []


def test_a_call_that_a_checkpoint_lost_is_made_again(loop: Any) -> None:
    made = Asks()
    stopped = Request(
        1, np.array([1], np.int32), 7, SamplingParams(max_new_tokens=2, ignore_eos=True), copy.deepcopy(made)
    )
    loop.add(stopped)
    while not stopped.calls:
        loop.step()
    again = resumed(loop, stopped, made)
    finish(loop, again)
    assert again.tree is not None
    assert again.program.result == "AGAIN"  # type: ignore[attr-defined]
