"""Judges and reward models behind a server, rolltree's own and a moody stand-in; and the policy as its own judge."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response

from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.config import load_config
from rolltree.engine.app.console import Console
from rolltree.engine.app.server import make_app
from rolltree.engine.errors import UserError
from rolltree.engine.loop.orchestrator import Orchestrator
from rolltree.engine.model.loading import load_model
from rolltree.engine.record.failures import kind
from rolltree.engine.rewards import RewardItem, RewardResult, Rewards, make_rewards
from rolltree.engine.rewards.judge import ProgramVerifier
from rolltree.engine.rewards.policy import PolicyScorer
from rolltree.engine.rewards.remote import SCORE, filled, past_proxies
from rolltree.engine.rollout import EngineConfig, NativeEngine
from rolltree.engine.settings import RewardConfig

from ...support.serving import model, tokenizer
from ...support.tiny import write_job


@contextmanager
def serving(app: Any) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


class Moody:
    """Answers by what the response says."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.running = self.most = 0
        self.seen: dict[str, int] = {}
        self.bodies: list[dict[str, Any]] = []
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.post("/classify")(self.classify)

    async def chat(self, request: Request) -> Any:
        body = await request.json()
        self.bodies.append(body)
        text = body["messages"][-1]["content"]
        self.seen[text] = self.seen.get(text, 0) + 1
        while "slow" in text and not await request.is_disconnected():
            await asyncio.sleep(0.05)
        if "slow" in text:  # nobody waits any more, and what a later test counts is not this one
            return Response("{}", status_code=400)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.02)
        self.running -= 1
        if "refused" in text or ("busy" in text and self.seen[text] < 3):
            return Response("{}", status_code=400 if "refused" in text else 429)
        said = {"good": "Score: 3, no, Score: 9", "silent": "hm", "beyond": "Score: 11"}
        content = next((said[word] for word in said if word in text), "Score: 5")
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        if text.startswith("{"):
            told = json.loads(text)
            choice |= {"finish_reason": told.pop("end", "stop"), "message": message | told}
        return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}

    async def classify(self, request: Request) -> Any:
        body = await request.json()
        return {"data": [{"index": 0, "label": "LABEL_0", "probs": [float(len(body["input"])), -2.0]}]}


@pytest.fixture(scope="module")
def moody() -> Iterator[tuple[Moody, str]]:
    made = Moody()
    with serving(made.app) as url:
        yield made, url


def judge(url: str, **options: Any) -> Rewards:
    timeout_s = options.pop("timeout_s", 20.0)
    verifier = options.pop("verifier", "judge")
    given = {"base_url": url, "model": "m", **options}
    return make_rewards(RewardConfig(verifier=verifier, timeout_s=timeout_s, options=given))


def items(*texts: str) -> list[RewardItem]:
    return [RewardItem(text, {"answer": "4"}, problem="2 + 2", prompt="<2 + 2>") for text in texts]


@pytest.mark.slow
def test_a_judges_score_is_the_reward_and_its_failures_are_told_apart(moody: tuple[Moody, str]) -> None:
    server, url = moody
    with judge(f"{url}/v1", prompt="{response}", timeout_s=3.0, system="Be strict.") as rewards:
        found = rewards.score(items("good", "fair", "silent", "beyond", "refused", "busy", "slow"))
    assert [verdict.value for verdict in found] == [0.9, 0.5, None, None, None, 0.5, None]
    assert found[2].reason == "ValueError: the judge gave no score, but 'hm'"
    assert found[3].reason == "ValueError: the judge gave no score from 0 to 10, but 11"
    assert str(found[4].reason).startswith("BadRequestError")
    assert found[6] == RewardResult(None, "timeout")
    assert server.seen["busy"] == 3
    assert server.bodies[0]["messages"][0] == {"role": "system", "content": "Be strict."}
    with pytest.raises(ValueError, match="closed"):
        rewards.score(items("good"))


@pytest.mark.check(but=5)
@pytest.mark.parametrize(
    ("answer", "value", "why"),
    [
        ({"content": "<think>A first score: 2.</think>Score: 9"}, 0.9, None),
        ({"content": "Score: 2?</think>Score: 9"}, 0.9, None),
        ({"content": "Score: 7", "reasoning_content": "Score: 3"}, 0.7, None),
        ({"content": "<|channel|>analysis<|message|>Score: 2<|end|><|channel|>final<|message|>Score: 9"}, 0.9, None),
        ({"content": "<think>Score: 3, or"}, None, "no_score"),
        ({"content": "<think>Perhaps Score: 3.</think>I cannot judge this."}, None, "no_score"),
        ({"content": "<|channel|>analysis<|message|>Score: 2"}, None, "no_score"),
        ({"content": "[THINK]Score: 3[/THINK]"}, None, "no_score"),
        ({"content": "Right.\nScore: 1", "end": "length"}, None, "cut_off"),
        ({"content": None, "end": "length", "reasoning_content": "Score: 3"}, None, "cut_off"),
        ({"content": "Score: 5 so far", "end": "content_filter"}, None, "no_score"),
        ({"content": "Score: 5", "end": "tool_calls"}, None, "no_score"),
        ({"content": None}, None, "no_score"),
    ],
)  # fmt: skip
def test_a_verdict_is_what_a_judge_decided(
    moody: tuple[Moody, str], answer: dict[str, Any], value: float | None, why: str | None
) -> None:
    with judge(f"{moody[1]}/v1", prompt="{response}") as rewards:
        (found,) = rewards.score(items(json.dumps(answer)))
    assert found.value == value
    assert (found.reason and kind(found.reason)) == why


@pytest.mark.check(but=4)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "0.0.0.0"])
@pytest.mark.parametrize("proxy", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_a_judge_on_this_machine_is_asked_without_a_proxy(
    moody: tuple[Moody, str], monkeypatch: pytest.MonkeyPatch, host: str, proxy: str
) -> None:
    monkeypatch.setenv(proxy, "http://127.0.0.1:9")  # where nothing listens
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    url = moody[1].replace("127.0.0.1", host)
    with judge(f"{url}/v1", prompt="{response}", retries=0) as rewards:
        assert [verdict.value for verdict in rewards.score(items("good"))] == [0.9]


@pytest.mark.check(but=3)
@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://localhost:8000/v1", True),
        ("https://judge.localhost/v1", True),
        ("http://[::1]:8000/v1", True),
        ("http://[::]:1", True),
        ("http://127.1.2.3", True),
        ("http://judge.example/v1", False),
        ("http://localhost.example/v1", False),
        ("http://10.0.0.1:8000", False),
        ("http://user@127.0.0.1:1/", True),
    ],
)
def test_only_servers_on_this_machine_are_past_the_proxy(url: str, here: bool) -> None:
    mounts = past_proxies(url)
    assert bool(mounts) is here
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("http_proxy", "http://127.0.0.1:9")
        patch.setenv("https_proxy", "http://127.0.0.1:9")
        patch.setenv("no_proxy", "")
        with httpx.Client(mounts=mounts) as client:
            direct = client._transport_for_url(httpx.URL(url)) is client._transport
    assert direct is here


def test_only_so_many_requests_are_outstanding(moody: tuple[Moody, str]) -> None:
    server, url = moody
    server.most = 0
    with judge(f"{url}/v1", prompt="{response}", at_once=3) as rewards:
        found: list[RewardResult] = []
        threads = [
            threading.Thread(target=lambda i=i: found.extend(rewards.score(items(*[f"{i} {k}" for k in range(6)]))))
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [verdict.value for verdict in found] == [0.5] * 12
    assert server.most == 3


def test_a_judge_that_is_closed_lets_its_callers_go(moody: tuple[Moody, str]) -> None:
    rewards, said = judge(f"{moody[1]}/v1", prompt="{response}"), []

    def ask() -> None:
        try:
            rewards.score(items("slow"))
        except ValueError as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.3)
    rewards.close()
    rewards.close()
    thread.join(10)
    assert said == ["The judge was closed before it had answered."]


def test_nobody_at_home_is_a_reason_and_no_end() -> None:
    with judge("http://127.0.0.1:9/v1", retries=0) as rewards:
        (found,) = rewards.score(items("good"))
    assert found == RewardResult(None, "APIConnectionError: Connection error")


def test_a_reward_model_is_given_prompt_and_response(moody: tuple[Moody, str]) -> None:
    with judge(moody[1], verifier="reward_model") as rewards:
        assert [verdict.value for verdict in rewards.score(items("four", ""))] == [11.0, 7.0]
    with judge(moody[1], verifier="reward_model", label=1) as rewards:
        assert rewards.score(items("four"))[0].value == -2.0
    with judge(moody[1], verifier="reward_model", label=7) as rewards:
        assert "IndexError" in str(rewards.score(items("four"))[0].reason)


def test_the_projects_own_server_judges() -> None:
    """The server judges by its text, which a random model never ends in a score, and by probabilities of two words."""
    engine, words = NativeEngine(model(), tokenizer(), EngineConfig(kv_tokens=4096)), tokenizer()
    message = [{"role": "user", "content": "four?"}]
    prompt = words.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
    ((*logprobs,),) = engine.score([prompt], [[[token] for token in range(256)]])
    likely = {token: float(logprob[0]) for token, logprob in enumerate(logprobs)}
    letters: dict[str, float] = {}
    for token in sorted(likely, key=lambda token: -likely[token])[:20]:
        if (letter := words.decode([token]).strip().casefold()).isalnum():
            letters[letter] = letters.get(letter, 0.0) + math.exp(likely[token])
    (yes, p), (no, q), *_ = letters.items()
    with serving(make_app(engine, "tiny")) as url:
        with judge(f"{url}/v1", model="tiny", prompt="{response}?", max_tokens=4) as rewards:
            (found,) = rewards.score(items("four"))
        with judge(f"{url}/v1", model="tiny", prompt="{response}?", yes=yes, no=no) as rewards:
            (share,) = rewards.score(items("four"))
        with judge(f"{url}/v1", model="tiny", prompt="{response}?", yes="never", no="ever") as rewards:
            (neither,) = rewards.score(items("four"))
    assert found.reason == "ValueError: the judge's answer was cut off at max_tokens = 4; raise it"
    assert share.value == pytest.approx(p / (p + q), rel=1e-4)
    assert "the judge gave no score: neither of" in str(neither.reason)


@pytest.mark.parametrize(
    ("options", "needle"),
    [
        ({"prompt": "good?"}, "where the response is inserted"),
        ({"pattern": "("}, "no regular expression"),
        ({"pattern": r"\d"}, "a group"),
        ({"yes": "Yes"}, "both of yes and no"),
        ({"lowest": 3, "highest": 3}, "lowest < highest"),
        ({"at_once": 0}, "at_once >= 1"),
        ({"modle": "m"}, "did you mean 'model'"),
        ({"config": {}}, "no option 'config'"),
    ],
)
def test_options_of_a_judge_are_checked(options: dict[str, Any], needle: str) -> None:
    with pytest.raises(UserError, match=needle):
        judge("http://127.0.0.1:9", **options)
    with pytest.raises(UserError, match=r"needs the option 'base_url'; give it in reward\.options"):
        make_rewards(RewardConfig(verifier="judge", options={"model": "m"}))


def test_templates_are_filled_and_nothing_in_a_response_is() -> None:
    item = RewardItem("{answer} {x}", {"answer": "4"}, problem="p", prompt="q")
    assert filled("{problem} {prompt} {response} {answer} {y}", item) == "p q {answer} {x} 4 {y}"
    assert filled("{response}", RewardItem("a\ud800b", {})) == "a\ufffdb"  # half a character, which JSON cannot send
    assert len(filled("{answer}", RewardItem("", {"answer": 10**5000}))) == 5001


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("It is: 4", "It is"),
        ("<think>a: 3</think>It is: 4", "<think>a: 3</think>It is"),
        ("a: 3</think>It is: 4", "a: 3</think>It is"),
        ("<think>a: 3</think>It is 4", None),
        ("<think>a: 3", None),
        ("<think>a:", None),
        ("It is 4", None),
    ],
)
def test_a_mark_in_the_reasoning_is_none(text: str, before: str | None) -> None:
    asked = list[str]()

    def score(prompts: list[str], continuations: list[str]) -> list[Any]:
        asked.extend(prompts)
        return [np.array([0.0], np.float32)] * len(prompts)

    (found,) = PolicyScorer(score, prompt="{response}", mark=":").score(items(text))
    assert asked == ([] if before is None else [before])
    assert found == (RewardResult(0.0, None, unparsed="no_mark") if before is None else RewardResult(1.0, None))


# -- the policy --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("home")
    write_job(directory)
    return directory


def scored(home: Path, directory: Path, *more: str) -> Orchestrator:
    given = [
        f"--output_dir={directory}/runs", "--trainer.steps=2", "--trainer.prompts_per_step=2",
        "--evaluation.problems=2", "--evaluation.every=0", "--reward.verifier=policy",
    ]  # fmt: skip
    made = build(load_config(home / "tiny.toml", [*given, *more]), console=Console())
    made.run()
    return made


def test_the_policys_own_probabilities_are_the_reward(home: Path, tmp_path: Path) -> None:
    options = '{prompt = "{prompt}{response}\\n= ", continuation = "{answer}", measure = "logprob"}'
    made = scored(home, tmp_path, f"--reward.options={options}", "--trainer.steps=1")
    rows = pq.read_table(made.options.directory / "rollouts" / "step_000001.parquet").to_pylist()
    first = NativeEngine(load_model(str(home / "model")), made.tokenizer)
    assert len(rows) == 8
    for row in rows:
        answer = str(eval(row["prompt_text"].partition(":")[2].rstrip(" =\n")))
        texts = f"{row['prompt_text']}{row['response_text']}\n= ", answer
        before, after = (made.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        (((logprobs),),) = first.score([before], [[after]])
        assert row["reward"] == pytest.approx(float(np.mean(logprobs)), abs=1e-4)


@pytest.mark.check(but=1)
@pytest.mark.parametrize("measure", ["product", "gain"])
def test_the_reference_answer_replaces_the_responses_own(home: Path, tmp_path: Path, measure: str) -> None:
    """VeriFree: the product of the answer's probabilities; RLPR: their mean, less that without the response."""
    options = f'{{prompt="{{prompt}}{{response}}\\n= ", continuation="{{answer}}", measure="{measure}", mark="e"}}'
    made = scored(home, tmp_path, f"--reward.options={options}", "--trainer.steps=1", "--rollout.n=8")
    rows = pq.read_table(made.options.directory / "rollouts" / "step_000001.parquet").to_pylist()
    first = NativeEngine(load_model(str(home / "model")), made.tokenizer)

    def probabilities(before: str, answer: str) -> np.ndarray:
        ids = [made.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, answer)]
        return np.exp(first.score([ids[0]], [[ids[1]]])[0][0].astype(np.float64))

    marked = [row for row in rows if "e" in row["response_text"]]
    assert 0 < len(marked) < len(rows)
    assert all(row["reward"] == 0 for row in rows if row not in marked)
    for row in marked:
        answer = str(eval(row["prompt_text"].partition(":")[2].rstrip(" =\n")))
        reasoning = row["response_text"][: row["response_text"].rindex("e")]
        given = probabilities(f"{row['prompt_text']}{reasoning}\n= ", answer)
        expected = given.prod()
        if measure == "gain":
            expected = min(max(given.mean() - probabilities(f"{row['prompt_text']}\n= ", answer).mean(), 0), 1)
        assert row["reward"] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert measure == "gain" or any(row["reward"] > 0 for row in marked)


def test_a_gain_is_the_difference_to_no_response_within_0_and_1() -> None:
    known = {"q: good\n= ": [0.9, 0.7], "q: bad\n= ": [0.1, 0.1], "q:\n= ": [0.5, 0.3]}

    def score(prompts: list[str], continuations: list[str]) -> list[np.ndarray]:
        assert set(continuations) == {"4"}
        return [np.log(known[prompt]) for prompt in prompts]

    judge = PolicyScorer(score, prompt="{prompt}{response}\n= ", measure="gain", mark="|")
    items = [RewardItem(text, {"answer": "4"}, prompt="q:") for text in (" good|5", " bad|4", " good")]
    good, bad, unmarked = judge.score(items)
    assert good.value == pytest.approx(0.4)
    assert (bad.value, unmarked.value, unmarked.unparsed) == (0, 0, "no_mark")


@pytest.mark.check(but=1)
@pytest.mark.parametrize("staleness", [0, 1])
def test_runs_are_judged_between_the_engines_steps(home: Path, tmp_path: Path, staleness: int) -> None:
    made = scored(home, tmp_path, f"--loop.staleness={staleness}", "--loop.overlap=true")
    assert made.step == 2
    assert made.evaluation.last is not None


def test_programs_cannot_ask_the_policy_while_it_samples() -> None:
    judge = ProgramVerifier(make_rewards(RewardConfig(verifier="policy")))
    with pytest.raises(RuntimeError, match="cannot judge while a program samples"):
        judge("a", {})


@pytest.mark.parametrize("options", [{"prompt": "{problem}"}, {"continuation": ""}, {"measure": "perplexity"}])
def test_options_of_the_policys_scores_are_checked(options: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"reward\.verifier = 'policy'"):
        make_rewards(RewardConfig(verifier="policy", options=options))


def test_the_programs_rewards_are_taken_and_the_rest_is_skipped() -> None:
    with make_rewards(RewardConfig(verifier="program")) as rewards:
        found = rewards.score([RewardItem("a", {}, given_reward=0.5), RewardItem("b", {})])
    assert found == [RewardResult(0.5, None), RewardResult(None, None, skipped="no_reward")]


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("Score: 8", "8"), ("**Score:** 8", "8"), ("**Score**: 8", "8"), ("Score: **8**", "8"),
        ("**Score: 8.5/10**", "8.5"),
        ("Score = 8", "8"), ("The score is 8.", "8"), ("Rating (0-10): `8`", "8"), ("Score：8", "8"), ("score 8", None),
        ("Scores vary", None), ("Score: high", None),
    ],
)  # fmt: skip
def test_scores_are_found_in_usual_writing(said: str, score: str | None) -> None:
    found = re.search(SCORE, said)
    assert (found and found[1]) == score
