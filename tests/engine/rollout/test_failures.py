"""An error of one request ends that one alone, and a step that fails leaves the engine usable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from rolltree.engine.programs import Action, Fork, GroupState, RolloutProgram, SegmentReport
from rolltree.engine.rollout import EngineConfig, NativeEngine, Request, SamplingParams

from .test_native_engine import PROMPTS, assert_all_free, engine, letters, model, responses

PARAMS = SamplingParams(n=2, max_new_tokens=8, ignore_eos=True)


def run(native: NativeEngine, requests: Sequence[Request]) -> None:
    for _ in range(300):
        native.step()
        if all(request.done for request in requests):
            return
    pytest.fail("the requests did not end within 300 steps")


def expect_alone(native: NativeEngine, good: Sequence[Request], prompts: Sequence[list[int]]) -> None:
    expected = engine().generate(prompts, PARAMS, seeds=list(range(len(prompts))))
    assert [responses(r.tree) for r in good if r.tree] == [responses(tree) for tree in expected]
    assert_all_free(native)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top_k": 3_000_000_000}, "top_k is 3000000000; give an integer from 1 to 2147483647"),
        ({"top_k": 2.0}, "top_k is 2.0"),
        ({"n": 10**6}, "n is 1000000; give an integer from 1 to 65536"),
        ({"n": True}, "n is True"),
        ({"max_new_tokens": 2**40}, "max_new_tokens is"),
        ({"seed": 2**64}, "seed is"),
        ({"stop": ("\ud800",)}, "lone surrogate"),
        ({"stop": (b"x",)}, "give a sequence of strings"),
        ({"stop_token_ids": [2**35]}, "stop_token_ids is 34359738368"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids is 1.5"),
        ({"logit_bias": {10: 1e39}}, "finite in float32"),
        ({"temperature": 1e-40}, "temperature is 1e-40"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": "1"}, "top_p is '1'"),
        ({"top_logprobs": 10**6}, "top_logprobs is 1000000"),
        ({"prefix_allowed_tokens_fn": [1]}, "cannot be called"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SamplingParams(**changes)


@pytest.mark.parametrize(
    "prompt", [[1.5, 2.0], [[1, 2], [3, 4]], [[1], [2, 3]], [2**70], [True], ["a"], np.ones((1, 2))]
)
def test_prompts_that_are_not_token_ids_are_refused(prompt: Any) -> None:
    native = engine()
    with pytest.raises(ValueError, match="Prompt 1 "):
        native.submit([PROMPTS[0], prompt], PARAMS)
    assert not native.loop.busy


@pytest.mark.parametrize("kv_tokens", [2**31, -1, 3.5])
def test_sizes_beyond_their_integers_are_refused(kv_tokens: Any) -> None:
    with pytest.raises(ValueError, match="kv_tokens is"):
        EngineConfig(kv_tokens=kv_tokens)


def test_a_fork_beyond_any_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Explodes(RolloutProgram):
        segment_tokens = 2

        def decide(self, group: GroupState, finished: Sequence[SegmentReport]) -> Iterable[Action]:
            for segment in finished:
                yield Fork(segment.branch, 10**6)

    from rolltree.engine.rollout.native import loop

    monkeypatch.setattr(loop, "MOST_LOGITS_BYTES", 10_000)
    native = engine()
    with pytest.raises(ValueError, match="ask for 11 at most"):
        native.submit([PROMPTS[0], PROMPTS[1]], [PARAMS, SamplingParams(n=12)])
    assert not native.loop.busy
    (bad,) = native.submit([PROMPTS[1]], PARAMS, Explodes())
    good = native.submit(PROMPTS[2:4], PARAMS, seeds=[0, 1])
    run(native, [bad, *good])
    assert "1000000 branches of one fork" in str(bad.error)
    expect_alone(native, good, PROMPTS[2:4])


class Poison:
    """Raises for the request named, in one of the places where a step works for one request."""

    def __init__(self, native: NativeEngine, request: Request, error: BaseException) -> None:
        self.native, self.request, self.error = native, request, error

    def around(self, owner: Any, name: str, requests_of: Callable[..., Request], patch: pytest.MonkeyPatch) -> None:
        right = getattr(owner, name)

        def wrong(*args: Any, **kwargs: Any) -> Any:
            if requests_of(*args) is self.request:
                raise self.error
            return right(*args, **kwargs)

        patch.setattr(owner, name, wrong)


PLACES: dict[str, tuple[Callable[[NativeEngine], Any], str, Callable[..., Request]]] = {
    "start": (lambda native: native.loop, "_first", lambda request: request),
    "fork": (lambda native: native.loop, "children", lambda parent, n: parent.request),
    "row": (lambda native: native.loop.stops, "table", lambda request, rows: request),
    "stop": (lambda native: native.loop.stops, "text", lambda rows, branch, new: branch.request),
    "segment": (lambda native: native.loop, "_end_segment", lambda branch, *_: branch.request),
    "report": (lambda native: native.loop, "path_so_far", lambda branch: branch.request),
    "finish": (lambda native: native.loop, "_seal", lambda branch: branch.request),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [OverflowError("too large"), SystemExit(0)], ids=["error", "exit"])
def test_one_poisoned_request_fails_alone_wherever_it_raises(
    place: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = NativeEngine(model("qwen3"), letters(), EngineConfig(page_size=4, kv_tokens=4096))
    strict = SamplingParams(n=2, max_new_tokens=8, ignore_eos=True, stop=("\x00",))
    first = native.submit([PROMPTS[2]], PARAMS, seeds=[0])
    (bad,) = native.submit([PROMPTS[3]], strict)
    good = [*first, *native.submit(PROMPTS[4:], PARAMS, seeds=[1, 2])]
    owner, name, request_of = PLACES[place]
    Poison(native, bad, error).around(owner(native), name, request_of, monkeypatch)
    run(native, [bad, *good])
    assert ("too large" if isinstance(error, Exception) else "sys.exit(0)") in str(bad.error)
    assert bad.tree is None
    expect_alone(native, good, [PROMPTS[2], *PROMPTS[4:]])


def test_biases_changed_behind_the_check_fail_their_request_alone() -> None:
    native = engine()
    bias: dict[int, float] = {20: 1.0}
    (bad,) = native.submit([PROMPTS[1]], SamplingParams(n=2, max_new_tokens=8, logit_bias=bias))
    good = native.submit(PROMPTS[2:4], PARAMS, seeds=[0, 1])
    bias[10**9] = 1.0
    run(native, [bad, *good])
    assert all("biases: IndexError" in (c.error or "") for c in bad.completions())
    expect_alone(native, good, PROMPTS[2:4])


@pytest.mark.parametrize("host", [0, 4096])
def test_a_step_that_fails_ends_what_it_computed_and_nothing_else(host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three requests are in the step that fails; keys it claimed to have computed are not used again."""
    native = engine(max_prefill_tokens=8, host_kv_tokens=host, debug=True)
    first = native.submit([PROMPTS[2]], PARAMS, seeds=[0])
    while not native.loop.rows.running.any():
        native.step()
    filling = native.submit([PROMPTS[3]], PARAMS, seeds=[0])
    waiting = native.submit([PROMPTS[5], PROMPTS[3]], PARAMS, seeds=[0, 1])
    runner, right = native.loop.runner, native.loop.runner.run
    failures = iter([None, None, RuntimeError("out of memory")])

    def run_once(*args: Any) -> Any:
        if (error := next(failures, None)) is not None:  # the keys that the step was to compute are claimed already
            raise error
        return right(*args)

    monkeypatch.setattr(runner, "run", run_once)
    run(native, [*first, *filling, *waiting])
    assert [str(r.error) for r in (*first, *filling)] == ["out of memory"] * 2
    expect_alone(native, waiting, [PROMPTS[5], PROMPTS[3]])
    again = native.submit([PROMPTS[2], PROMPTS[3]], PARAMS, seeds=[0, 1])
    run(native, again)
    expect_alone(native, again, [PROMPTS[2], PROMPTS[3]])


def test_an_interrupted_step_leaves_no_keys_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    native = engine()

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(native.loop.runner, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            native.generate(PROMPTS[2:4], PARAMS)
    assert all("ended by KeyboardInterrupt" in str(request.error) for request in native.step())
    assert not native.loop.busy
    native.cache.tree.check()
    good = native.submit(PROMPTS[2:4], PARAMS, seeds=[0, 1])
    run(native, good)
    expect_alone(native, good, PROMPTS[2:4])


def test_tables_of_stop_tokens_do_not_pile_up() -> None:
    native = engine()
    for token in range(40):
        native.generate([PROMPTS[0]], SamplingParams(n=1, max_new_tokens=1, stop_token_ids=[token]))
    assert len(native.loop.stops._tables) == 16
