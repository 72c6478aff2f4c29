"""Several teachers, and teachers on servers: what they tell of trees, runs that learn from them, and what fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolltree.engine import TokenTree, UserError, backward, pack
from rolltree.engine.data.columns import TOP_IDS, TOP_LOGPROBS
from rolltree.engine.model.roles import Role
from rolltree.engine.model.teachers.served import ServedTeacher
from rolltree.engine.model.teachers.several import Teachers
from rolltree.engine.protocols.scoring import ScoringServer
from rolltree.engine.rollout import EngineConfig, NativeEngine
from rolltree.engine.train.distillation import COUNTED, DivergenceTerm

from ...support.serving import in_thread, make_engine
from ...support.tiny import tiny_job
from ..model.test_tree_equals_flat import make_models
from ..train.test_terms import gradients, group
from .test_whole_distributions import run, teacher  # noqa: F401

toml = tiny_job()
OPTIONS: dict[str, Any] = {"top": 5, "at_once": 4, "timeout_s": 5.0, "retries": 1, "api_key_env": "NO_KEY"}


def tree_of(*responses: list[int], task: str = "one") -> TokenTree:
    tree = TokenTree.from_sequences([5, 6, 7], [list(r) for r in responses])
    tree.advantage[:] = 1
    tree.meta["task"] = task
    return tree


# -- several teachers --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models() -> tuple[Any, dict[str, Any]]:
    """A policy, and two teachers with other weights."""
    ours, _ = make_models("qwen3")
    teachers = {}
    for number, name in enumerate(("one", "two")):
        other, _ = make_models("qwen3")
        with torch.no_grad():
            for p in other.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel() + number)))
        teachers[name] = other.requires_grad_(False)
    return ours, teachers


def several(teachers: dict[str, Any], scores: bool = False) -> Teachers:
    roles = {name: Role("teacher_logprob", model, scores=scores) for name, model in teachers.items()}
    return Teachers(roles, lambda tree: tree.meta["task"], scores=scores)


@pytest.mark.parametrize("max_tokens", [1000, 6])
def test_each_tree_has_its_teacher(models: Any, max_tokens: int) -> None:
    """The loss is the sum of two runs with one teacher each; with the teachers exchanged it is another one."""
    ours, teachers = models

    def loss(role: Role, *tasks: str) -> tuple[float, list[torch.Tensor], dict[str, Any]]:
        term = DivergenceTerm(COUNTED, "distill", options={"kind": "jsd", "beta": 0.3})
        term.teacher.role = role
        trees = [group() for _ in tasks]
        for tree, task in zip(trees, tasks, strict=True):
            tree.meta["task"] = task
        term.prepare(trees)
        total, metrics = 0.0, {}
        for batch in pack(trees, max_tokens=max_tokens, in_pieces=True):
            out = backward(ours, batch, [term.on(batch, 1.0, True, 1.0)], temperature=0.8)
            total += float(out.loss)
            for name, (value, _) in out.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + float(value)
        return total, gradients(ours), metrics

    both, grads, metrics = loss(several(teachers), "two", "one", "two")
    parts = {name: loss(Role("teacher_logprob", model, scores=False), "any") for name, model in teachers.items()}
    assert both == pytest.approx(parts["one"][0] + 2 * parts["two"][0], rel=1e-5)
    for mine, one, two in zip(grads, parts["one"][1], parts["two"][1], strict=True):
        torch.testing.assert_close(mine, one + 2 * two, rtol=1e-4, atol=1e-5)
    assert metrics["distill/divergence/two"] == pytest.approx(2 * parts["two"][0], rel=1e-5)
    exchanged, _, _ = loss(several(dict(zip(teachers, reversed(teachers.values()), strict=True))), "two", "one", "two")
    assert abs(exchanged / both - 1) > 1e-3


def test_each_tree_is_scored_by_its_teacher(models: Any) -> None:
    _, teachers = models
    trees = [tree_of([1, 2, 3], [1, 4], task=task) for task in ("two", "one", "two")]
    role = several(teachers, scores=True)
    role.score(trees, pack(trees, max_tokens=13), temperature=0.7)
    for tree in trees:
        alone = tree_of([1, 2, 3], [1, 4])
        Role("teacher_logprob", teachers[tree.meta["task"]]).score(
            [alone], pack([alone], max_tokens=99), temperature=0.7
        )
        np.testing.assert_allclose(tree.teacher_logprob, alone.teacher_logprob, rtol=1e-5)
    assert abs(trees[0].teacher_logprob - trees[1].teacher_logprob)[3:].max() > 0.01


@pytest.mark.slow(but=1)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("recipe", ["mopd", "opd_full"])
def test_a_run_with_several(toml: Path, teacher: Path, recipe: str, tmp_path: Path) -> None:  # noqa: F811
    """The teacher of the run's task teaches as it does alone; a task without one is named."""
    named = f"--roles.teachers={{add={{path='{teacher}'}},same={{path='{toml.parent}/model'}}}}"
    with pytest.raises(UserError, match=r"has the teacher 'chain_sum' .*roles.teachers has add, same"):
        run(toml, tmp_path, f"--recipe={recipe}", named)
    named = f"--roles.teachers={{chain_sum={{path='{teacher}'}},same={{path='{toml.parent}/model'}}}}"
    rows, _ = run(toml, tmp_path / "named", f"--recipe={recipe}", named)
    one, _ = run(toml, tmp_path / "one", f"--recipe={recipe.replace('mopd', 'opd')}", f"--roles.teacher.path={teacher}")
    name = "distill/divergence" if recipe == "opd_full" else "actor/pg_loss"
    assert [row[name] for row in rows] == pytest.approx([row[name] for row in one], rel=1e-4)


# -- a server of this project ------------------------------------------------------------------------------------------


def test_the_log_probs_of_a_served_model(toml: Path) -> None:
    """Shared places have one value, a path that begins another one costs no question, and none is asked twice."""
    engine = make_engine()
    tree = tree_of([10, 11, 12, 13], [10, 11], [10, 20, 21], [10, 11])
    with in_thread(engine) as url:
        server = ScoringServer(f"{url}/v1", None, **OPTIONS)
        server.check(engine.tokenizer, 257)
        asked: list[int] = []

        def ask(sequences: Any, *more: Any) -> Any:
            asked.append(len(sequences))
            return server.score(sequences, *more)

        role = ServedTeacher("teacher_logprob", engine.model, ask, scores=True)
        role.score([tree], [], temperature=1.0)
        role.score([tree_of([10, 20, 21])], [], temperature=1.0)
    assert asked == [2]
    for leaf in range(tree.num_leaves):
        rows = tree.path_rows(leaf)
        ids = torch.from_numpy(tree.token_id[rows].astype(np.int64))[None]
        with torch.no_grad():
            logprob = engine.model(ids).logits[0, :-1].float().log_softmax(-1).numpy()[2:]
        response, at = ids[0, 3:].numpy(), rows[3:]
        own = np.take_along_axis(logprob, response[:, None], 1)
        np.testing.assert_allclose(tree.teacher_logprob[at], own[:, 0], rtol=1e-4, atol=1e-5)
        for token, kept, values, row in zip(
            response, tree.columns[TOP_IDS][at], tree.columns[TOP_LOGPROBS][at], logprob, strict=True
        ):
            present = kept[kept >= 0]
            assert set(np.argsort(-row)[:5]) | {token} == set(present)
            np.testing.assert_allclose(values[kept >= 0], row[present], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def served(toml: Path, teacher: Path) -> Iterator[Callable[[Path], Any]]:  # noqa: F811
    @contextmanager
    def serve(folder: Path) -> Iterator[str]:
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        engine = NativeEngine(model, AutoTokenizer.from_pretrained(folder), EngineConfig(kv_tokens=4096))
        with in_thread(engine) as url:
            yield f"--roles.teacher.url={url}/v1"

    return serve


@pytest.mark.slow
def test_a_run_with_a_server(toml: Path, teacher: Path, served: Any, tmp_path: Path) -> None:  # noqa: F811
    """A served copy of the policy teaches nothing at first; another model does, also beside its tokens' log-probs."""
    with served(toml.parent / "model") as url:
        rows, _ = run(toml, tmp_path, "--recipe=opd_topk", url, "--loop.score_early=true")
    assert all(abs(row["distill/divergence"]) < 1e-5 for row in rows)
    with served(teacher) as url:
        rows, _ = run(toml, tmp_path / "other", "--recipe=opd_topk", url, "--trainer.steps=7")
        early, _ = run(toml, tmp_path / "early", "--recipe=opd_topk", url, "--loop.score_early=true")
        sampled, _ = run(toml, tmp_path / "opd", "--recipe=opd", url)
    divergence = [row["distill/divergence"] for row in rows]
    assert sum(divergence[-3:]) / 3 < 0.9 * divergence[0], divergence
    assert [row["distill/divergence"] for row in early] == pytest.approx(divergence[:2], rel=1e-3)
    plain, _ = run(toml, tmp_path / "plain", "--recipe=opd", f"--roles.teacher.path={teacher}")
    assert [row["actor/pg_loss"] for row in sampled] == pytest.approx([row["actor/pg_loss"] for row in plain], rel=1e-3)


# -- servers that are late, wrong or something else --------------------------------------------------------------------


class Odd(BaseHTTPRequestHandler):
    """Answers with vLLM's ``prompt_logprobs`` unless ``wrong`` does otherwise."""

    wrong: Callable[[int, Any], Any]
    questions = 0

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(
            200, {"object": "list", "data": [{"id": "teacher", "object": "model", "created": 0, "owned_by": "x"}]}
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        cls = type(self)
        cls.questions += 1
        tables = [None, *({str(i): {"logprob": -1.0, "decoded_token": texts(i)}} for i in body["prompt"][1:])]
        answer = cls.wrong(cls.questions, tables)
        if isinstance(answer, tuple):
            self._send(*answer)
        else:
            self._send(200, {"choices": [{"index": 0, "text": "", "prompt_logprobs": answer}]})

    def _send(self, status: int, content: Any) -> None:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


ENGINE = make_engine()


def texts(token: int) -> str:
    return str(ENGINE.tokenizer.decode([token]))


@contextmanager
def odd(wrong: Callable[[int, Any], Any], **options: Any) -> Iterator[tuple[ScoringServer, type[Odd]]]:
    handler = type("Handler", (Odd,), {"wrong": staticmethod(wrong)})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield ScoringServer(f"http://127.0.0.1:{http.server_port}/v1", None, **OPTIONS | options), handler
    finally:
        http.shutdown()


def late(number: int, tables: Any) -> Any:
    time.sleep(0.6)
    return tables


WRONG: dict[str, tuple[Callable[[int, Any], Any], str]] = {
    "late": (late, "has not answered within 0.3 s"),
    "500": (lambda n, t: (500, {"error": "down"}), "failed 2 times, the last time because it answers 500"),
    "400": (lambda n, t: (400, {"error": "no"}), "refuses a question: it answers 400"),
    "html": (lambda n, t: (200, b"<html>"), "tells no log-probs of the tokens"),
    "another form": (lambda n, t: (200, {"choices": []}), "tells no log-probs of the tokens"),
    "too few": (lambda n, t: t[:-1], "places for 3 tokens"),
    "other tokens": (lambda n, t: [*t[:-1], {"9": t[-1]["3"]}], "no log-prob of the token at place 2"),
    "no number": (lambda n, t: [*t[:-1], {"3": {"logprob": "x"}}], "'x' is no log-prob"),
    "positive": (lambda n, t: [*t[:-1], {"3": {"logprob": 1.0}}], "1.0 is no log-prob"),
    "NaN": (lambda n, t: [*t[:-1], {"3": {"logprob": float("nan")}}], "nan is no log-prob"),
    "large ids": (lambda n, t: [*t[:-1], t[-1] | {"300": {"logprob": -1.0}}], "another vocabulary .* names token 300"),
}


@pytest.mark.slow(but=1)
@pytest.mark.check(but=3)
@pytest.mark.parametrize("case", WRONG)
def test_a_server_that_fails_is_named(case: str) -> None:
    wrong, sentence = WRONG[case]
    with odd(wrong, timeout_s=0.3) as (server, _), pytest.raises(UserError, match=f"(?s)The teacher at .*{sentence}"):
        server.score([[1, 2, 3]], [1], 257)


@pytest.mark.check
def test_a_server_that_recovers_is_asked_again() -> None:
    def busy(number: int, tables: Any) -> Any:
        return (429 if number == 1 else 503, {}) if number < 3 else tables

    with odd(busy, retries=2) as (server, handler):
        (known,) = server.score([[1, 2, 3]], [2], 257)
    assert known.logprob.tolist() == [-1.0]
    assert known.ids.tolist() == [[3, -1, -1, -1, -1, -1]]
    assert handler.questions == 3


def test_no_server() -> None:
    closed = ScoringServer("http://127.0.0.1:9/v1", "teacher", **OPTIONS)
    with pytest.raises(UserError, match="failed 2 times, the last time because Connection error"):
        closed.check(ENGINE.tokenizer, 257)


@pytest.mark.check
def test_a_teacher_of_other_tokens_is_refused() -> None:
    def another(number: int, tables: Any) -> Any:
        return [
            None,
            *({i: {**e, "decoded_token": e["decoded_token"].swapcase()} for i, e in t.items()} for t in tables[1:]),
        ]

    with odd(another) as (server, _), pytest.raises(UserError, match="another tokenizer than the policy: token"):
        server.check(ENGINE.tokenizer, 257)
    with odd(lambda n, t: t) as (server, _):
        server.check(ENGINE.tokenizer, 257)
