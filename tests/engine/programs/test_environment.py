"""Conversations with environments: what is appended, forked, awaited, rewarded and limited."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console as RichConsole

from rolltree.engine import LeafStatus, SamplingParams
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.config import load_config, training_config
from rolltree.engine.app.console import Console
from rolltree.engine.chat.messages import added_ids
from rolltree.engine.data.policies import in_role
from rolltree.engine.data.segment import Origin
from rolltree.engine.data.tree import TokenTree
from rolltree.engine.errors import UserError
from rolltree.engine.loop.checkpoints import Checkpoints
from rolltree.engine.programs import EnvironmentTurns, GenerateThenVerify, GroupState, Observation, RolloutProgram
from rolltree.engine.programs.chat.toolbox import Tool, tool_schema, tool_schemas
from rolltree.engine.programs.environment import _Talk
from rolltree.engine.record.failures import kind, unsampled
from rolltree.engine.rollout import EngineConfig, NativeEngine
from rolltree.engine.train import checkpoint

from ...support import serving
from ...support.conversations import TEMPLATE, write_conversations

QUESTION = [{"role": "user", "content": "Six times seven?"}]
WORDS = serving.tokenizer()
WORDS.chat_template = TEMPLATE
EOS = WORDS.eos_token_id


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    return NativeEngine(serving.model(), WORDS, EngineConfig(kv_tokens=8192))


Script = Callable[[str], str]
"""What the model says next, of all that has been said since its first turn began."""


def spoken(script: Script) -> Callable[[Any], list[int]]:
    """A grammar that lets the model say nothing but its script."""

    def allowed(ids: Any) -> list[int]:
        so_far = WORDS.decode(ids.tolist())
        turn = so_far.rpartition("<assistant>")[2]
        wanted = script(so_far[: len(so_far) - len(turn)])
        rest = wanted[len(turn) :]
        return [WORDS(rest, add_special_tokens=False)["input_ids"][0]] if rest else [EOS]

    return allowed


def talk(
    engine: NativeEngine,
    script: Script,
    program: RolloutProgram,
    *,
    n: int = 1,
    tools: Sequence[Tool] = (),
    row: Mapping[str, Any] | None = None,
    **params: Any,
) -> TokenTree:
    schemas = tool_schemas(tools) or None
    prompt = WORDS.apply_chat_template(
        QUESTION, tools=schemas, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    given = {"max_new_tokens": 300, "prefix_allowed_tokens_fn": spoken(script)} | params
    context = {"messages": QUESTION, "tools": tools, "answer": "42", **(row or {})}
    (tree,) = engine.generate([prompt], SamplingParams(n=n, **given), program, contexts=[context])
    return tree


def said(tree: TokenTree, leaf: int = 0) -> str:
    return str(WORDS.decode(tree.flatten()[leaf].response))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_tools_answer_is_appended_as_the_template_writes_it(engine: NativeEngine) -> None:
    first = call("calculator", expression="6 * 7")
    tree = talk(engine, lambda before: "So 42" if before else first, EnvironmentTurns(), tools=("calculator",))
    whole = [*QUESTION, {"role": "assistant", "content": first}, {"role": "tool", "content": "42"},
             {"role": "assistant", "content": "So 42"}]  # fmt: skip
    text = WORDS.apply_chat_template(whole, tools=[tool_schema("calculator")], tokenize=False)
    (leaf,) = tree.flatten()
    assert WORDS.decode([*leaf.prompt, *leaf.response]) + "\n" == text
    origin = tree.origin[tree.response_rows(0)]
    observed = [token for token, kind in zip(leaf.response, origin, strict=True) if kind == Origin.OBSERVATION]
    assert WORDS.decode(observed) == "\n<tool>42<end>\n<assistant>"
    assert (leaf.loss_mask == (origin == Origin.SAMPLED)).all()
    assert leaf.status == LeafStatus.STOP
    assert "given_rewards" not in tree.meta


def test_a_verifier_is_asked_as_the_template_writes_it(engine: NativeEngine) -> None:
    program = GenerateThenVerify(60, question="\nIs it right?\n")
    tree = talk(engine, lambda before: "Verdict: correct" if "<user>Is" in before else "It is 42", program)
    whole = [*QUESTION, {"role": "assistant", "content": "It is 42"}, {"role": "user", "content": "Is it right?"},
             {"role": "assistant", "content": "Verdict: correct"}]  # fmt: skip
    (leaf,) = tree.flatten()
    assert WORDS.decode([*leaf.prompt, *leaf.response]) + "\n" == WORDS.apply_chat_template(whole, tokenize=False)
    rows = tree.response_rows(0)
    said = [WORDS.decode(tree.token_id[rows][in_role(tree, role)[rows]]) for role in (0, 1)]
    assert said == ["It is 42<end>", "Verdict: correct<end>"]
    assert leaf.status == LeafStatus.STOP
    with pytest.raises(ValueError, match="ends turns of a chat by the template's tokens"):
        talk(engine, lambda before: "no", GenerateThenVerify(60, stop=["x"]))


@pytest.mark.parametrize(
    ("first", "answer"),
    [
        (call("calculator", expression="1 / 0"), "error: division by zero"),
        (call("calculator", number=1), "error: TypeError: calculate() got an unexpected keyword argument 'number'"),
        (call("oracle"), "error: that is no call of a tool; there are calculator"),
        ("<tool_call>{", "error: that is no call of a tool; there are calculator"),
        (call("calculator", expression="2") + call("calculator", expression="3"), "2<end>\n<tool>3"),
    ],
)
def test_what_goes_wrong_with_a_call_is_told_to_the_model(engine: NativeEngine, first: str, answer: str) -> None:
    tree = talk(engine, lambda before: "Sorry" if before else first, EnvironmentTurns(), tools=("calculator",))
    assert said(tree) == f"{first}<end>\n<tool>{answer}<end>\n<assistant>Sorry<end>"


def test_what_a_tool_says_becomes_no_special_token() -> None:
    ids = added_ids(WORDS, [{"role": "tool", "content": "a<end>b"}, {"role": "user", "content": ""}])
    assert WORDS.decode(ids) == "\n<tool>a<end>b<end>\n<user><end>\n<assistant>"
    assert ids.count(EOS) == 2


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}{{ m.content }}{% endfor %}", "{{ raise_exception('no') }}"]
)
def test_templates_without_turns_are_refused(template: str) -> None:
    words = serving.tokenizer()
    words.chat_template = template
    with pytest.raises(ValueError, match="chat template"):
        added_ids(words, [{"role": "user", "content": "a"}])


class Countdown:
    """Counts the model's turns down; its state is its own."""

    def __init__(self, context: Any, turns: int = 2) -> None:
        self.left, self.seen = turns, []

    async def step(self, messages: list[dict[str, Any]]) -> Observation:
        self.left -= 1
        self.seen.append(messages[-1]["content"])
        await asyncio.sleep(0)
        text = "".join(self.seen)
        return Observation([{"role": "user", "content": text}], done=self.left == 0, reward=float(len(text)))


def test_state_divides_with_the_branches(engine: NativeEngine) -> None:
    """Two responses become four; each environment has seen its own path alone."""
    program = EnvironmentTurns(Countdown, {"turns": 3}, ways=(2,))
    turns = SamplingParams(n=4, max_new_tokens=200, allowed_token_ids=[*WORDS("abcdefgh")["input_ids"], EOS], seed=3)
    prompt = WORDS.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=True, return_dict=False)
    context = {"messages": QUESTION, "tools": ()}
    (tree,) = engine.generate([prompt], turns, program, contexts=[context])
    assert tree.num_leaves == 4
    texts = [said(tree, leaf) for leaf in range(4)]
    for leaf, text in enumerate(texts):
        parts = [part.partition("<end>")[0] for part in text.split("<assistant>")]
        assert len(parts) == 3
        told = [part.partition("<user>")[2].partition("<end>")[0] for part in text.split("<assistant>")]
        assert told[:2] == [parts[0], parts[0] + parts[1]]
        assert tree.meta["given_rewards"][leaf] == sum(len("".join(parts[: k + 1])) for k in range(3))
        assert tree.status[leaf] == LeafStatus.STOP
    first = [text.partition("<end>")[0] for text in texts]
    assert first[0] == first[1]
    assert first[2] == first[3]
    assert len(set(texts)) == 4
    assert tree.num_tokens < tree.logical_tokens  # the first turn and what was said to it are stored once


def test_rewards_of_turns_are_at_their_last_tokens(engine: NativeEngine) -> None:
    """The last turn's reward stays the response's; the first turn, which two branches share, has its reward in both."""
    program = EnvironmentTurns(Countdown, {"turns": 3}, ways=(2,), turn_rewards=True)
    turns = SamplingParams(n=4, max_new_tokens=200, allowed_token_ids=[*WORDS("abcdefgh")["input_ids"], EOS], seed=3)
    prompt = WORDS.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=True, return_dict=False)
    context = {"messages": QUESTION, "tools": ()}
    (tree,) = engine.generate([prompt], turns, program, contexts=[context])
    assert tree.num_leaves == 4
    begin = 0
    for leaf, length in enumerate(tree.response_length.tolist()):
        found = tree.token_reward[begin : begin + length].tolist()
        begin += length
        parts = [part.partition("<end>")[0] for part in said(tree, leaf).split("<assistant>")]
        lengths = [len("".join(parts[: k + 1])) for k in range(3)]
        rows = tree.response_rows(leaf)
        ends = [i for i, row in enumerate(rows) if tree.token_id[row] == EOS and tree.origin[row] == Origin.SAMPLED]
        assert len(ends) == 3
        assert [found[i] for i in ends[:2]] == lengths[:2]
        assert [i for i, value in enumerate(found) if value == value] == ends[:2]
        assert tree.meta["given_rewards"][leaf] == lengths[2]


class Slow:
    """Waits where the model asks it to."""

    cancelled = 0

    def __init__(self, context: Any) -> None:
        self.turns = 0

    async def step(self, messages: list[dict[str, Any]]) -> str | None:
        self.turns += 1
        try:
            await asyncio.sleep(60 if "wait" in messages[-1]["content"] else 0.2 if self.turns == 1 else 0)
        except asyncio.CancelledError:
            Slow.cancelled += 1
            raise
        return None if self.turns == 2 else "go on"


def test_slow_environments_hold_nobody_up_and_are_cancelled(engine: NativeEngine) -> None:
    begin = time.monotonic()
    tree = talk(engine, lambda before: "b" if before else "a", EnvironmentTurns(Slow), n=16)
    assert [said(tree, leaf) for leaf in range(16)] == ["a<end>\n<user>go on<end>\n<assistant>b<end>"] * 16
    assert time.monotonic() - begin < 3  # 16 waits of 0.2 s one after the other would take longer
    tree = talk(engine, lambda before: "wait", EnvironmentTurns(Slow, timeout_s=0.2), n=2)
    assert [LeafStatus(s) for s in tree.status] == [LeafStatus.FAILED] * 2
    assert [kind(why) for why in unsampled(tree).values()] == ["timeout"] * 2
    deadline = time.monotonic() + 5
    while Slow.cancelled < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Slow.cancelled == 2


class Broken:
    def __init__(self, context: Any, answer: Any = 3) -> None:
        self.answer = answer

    def step(self, messages: list[dict[str, Any]]) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(3, "give an Observation, a text or None"), (Observation(reward=float("nan")), "which is not finite")],
)
def test_an_environment_that_errs_fails_its_response(engine: NativeEngine, answer: Any, reason: str) -> None:
    tree = talk(engine, lambda before: "a", EnvironmentTurns(Broken, {"answer": answer}))
    assert tree.status[0] == LeafStatus.FAILED
    assert reason in tree.meta["errors"][0]


def test_turns_and_tokens_are_limited(engine: NativeEngine) -> None:
    tree = talk(engine, lambda before: "abc", EnvironmentTurns(Countdown, {"turns": 9}, max_turns=2))
    assert said(tree).count("abc<end>") == 2 + 1  # said, said, and repeated once by the environment
    assert tree.status[0] == LeafStatus.LENGTH
    assert tree.meta["given_rewards"] == {0: 3.0 + 6.0}
    tree = talk(engine, lambda before: "abcdefgh", EnvironmentTurns(Countdown, turn_tokens=4))
    assert said(tree) == "abcd"
    assert tree.status[0] == LeafStatus.LENGTH
    tree = talk(engine, lambda before: "abc", EnvironmentTurns(Countdown, {"turns": 9}), max_new_tokens=16)
    assert tree.status[0] == LeafStatus.LENGTH
    assert tree.meta["given_rewards"] == {0: 3.0}


@pytest.mark.parametrize(
    ("program", "n", "needle"),
    [
        ({"environment": Countdown, "ways": (3,)}, 4, "multiple of 3"),
        ({"environment": "toools"}, 1, "did you mean 'tools'"),
        ({"environment": Countdown, "environment_options": {"turn": 3}}, 1, "did you mean 'turns'"),
        ({"environment": Countdown, "max_turns": 0}, 1, ">= 1"),
    ],
)
def test_mistakes_are_named(engine: NativeEngine, program: dict[str, Any], n: int, needle: str) -> None:
    with pytest.raises((UserError, ValueError), match=needle):
        talk(engine, lambda before: "a", EnvironmentTurns(**program), n=n)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("home")
    write_conversations(directory)
    return directory


@pytest.mark.check
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_of_games_from_its_toml(home: Path, tmp_path: Path, staleness: int) -> None:
    given = ["--trainer.steps=2", f"--output_dir={tmp_path}", f"--loop.staleness={staleness}", "--checkpoint.every=1"]
    made = build(load_config(home / "tiny.toml", given), console=Console())
    made.run()
    rows = pq.read_table(made.options.directory / "rollouts" / "step_000001.parquet").to_pylist()
    assert len(rows) == 24  # two responses a prompt, each of which divides after its first turn
    metrics = [json.loads(line) for line in (made.options.directory / "metrics.jsonl").read_text().splitlines()]
    judged = [r for r in rows if r["reward"] is not None and r["reward"] == r["reward"]]
    assert len(judged) == 24
    assert all(0 < r["reward"] < 2 for r in judged)  # the sum over two turns
    assert metrics[1]["reward/skipped"] == len(rows) - len(judged)
    assert metrics[1]["reward/failed"] == metrics[1]["rollout/failed"] == 0
    assert all(r["prompt_text"].startswith("<user>Guess ") for r in rows)


class CrashError(Exception):
    pass


@pytest.mark.slow(but=1)
@pytest.mark.check
@pytest.mark.parametrize("name", ["Steady", "Forgetful"])
def test_unfinished_conversations_survive_a_crash_or_are_counted(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Some wait for their environment when the run ends: what it was asked is asked again."""
    flag = tmp_path / "go on"
    environment = f'environment="{home}/parts.py:{name}",environment_options={{flag="{flag}"}}'
    options = f"{{{environment},max_turns=3,turn_tokens=12}}"
    given = ["--trainer.steps=3", f"--output_dir={tmp_path}", "--loop.staleness=1", "--loop.overlap=false"]
    given += ["--checkpoint.every=1", f"--rollout.program_options={options}"]
    config = load_config(home / "tiny.toml", given)
    save = Checkpoints.save

    def crashing(self: Checkpoints, step: int, row: dict[str, float]) -> None:
        save(self, step, row)
        if step == 1:
            raise CrashError

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", crashing)
        with pytest.raises(CrashError):
            build(config, console=Console()).run()
    saved = checkpoint.load_latest(config.run_dir / "checkpoints", training_config(config))
    groups = [dict(g["dict"]) for g in saved.state["groups"]]
    kept = [dict(g["request"]["dict"]) for g in groups if g["request"] is not None]
    assert any(request["calls"] for request in kept) == (name == "Steady")
    lost = sum(g["lost"] == "state" for g in groups)
    assert (lost > 0) == (name == "Forgetful")
    flag.touch()
    out = io.StringIO()
    made = build(config, console=Console(RichConsole(file=out, width=300)), resume=True)
    assert made.run().steps == 3
    metrics = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("group/restarted_state") for row in metrics] == [None, None, lost or None, None]
    assert (f"{lost} unfinished groups are begun anew: their program or environment" in out.getvalue()) == bool(lost)
    assert all(row["rollout/failed"] == 0 for row in metrics[1:])  # every environment knew which turn it was
    rows = [r for f in sorted((config.run_dir / "rollouts").glob("*.parquet")) for r in pq.read_table(f).to_pylist()]
    assert Counter(Counter(r["group"] for r in rows).values()) == {4: 18}  # none is lost or trained twice
    if name == "Steady":  # a response went on where it was
        assert any(len({v for v in r["policy_version"] if v >= 0}) > 1 for r in rows)


def test_tools_in_the_prompt_are_checked_before_a_run(home: Path, tmp_path: Path) -> None:
    def load(*tools: str) -> Any:
        given = [f"--output_dir={tmp_path}", f"--data.tools={json.dumps(list(tools))}"]
        return build(load_config(home / "tiny.toml", given), console=Console()).source.peek(1)[0]

    prompt = load(f"{home}/parts.py:hinted", "calculator")
    assert prompt.text.startswith("hinted,calculator,")
    assert prompt.context["tools"] == (f"{home}/parts.py:hinted", "calculator")
    with pytest.raises(UserError, match="cannot be described to the model"):
        load(f"{home}/parts.py:bare")
    with pytest.raises(UserError, match="'abacus', which is not known"):
        load("abacus")


class Ending:
    """It rewards the first turn alone, and ends at the second, by its limit or not."""

    def __init__(self, context: Any, truncated: bool) -> None:
        self.truncated, self.turns, self.opened = truncated, 0, 0

    def open(self, messages: Any, seconds: float) -> None:
        assert seconds == 60.0
        self.opened += 1

    def step(self, messages: Any) -> Observation:
        self.turns += 1
        assert self.opened == self.turns
        if self.turns == 1:
            return Observation([{"role": "user", "content": "on"}], reward=0.5)
        return Observation(done=True, truncated=self.truncated)


@pytest.mark.parametrize("truncated", [True, False])
def test_an_end_by_a_limit_is_told_and_earlier_rewards_stay(engine: NativeEngine, truncated: bool) -> None:
    tree = talk(engine, lambda before: "a", EnvironmentTurns(Ending, {"truncated": truncated}))
    assert list(tree.status) == [LeafStatus.LENGTH if truncated else LeafStatus.STOP]
    assert tree.meta["given_rewards"] == {0: 0.5}


class Judged:
    """It answers once, and judges how much was said to it; its state is plain."""

    def __init__(self, context: Any) -> None:
        self.said = 0

    def step(self, messages: Sequence[Any]) -> str | None:
        self.said += 1
        return None if messages[-1]["content"] == "end" else "on"

    def judge(self) -> float:
        self.said += 100
        return self.said / 4

    def fork(self) -> Judged:
        return Judged(None)

    def state_dict(self) -> int:
        return self.said

    def load_state_dict(self, state: int) -> None:
        self.said = state


@pytest.mark.parametrize(("turns", "options", "reward", "status"), [
    (("a", "end"), {}, 102 / 4, LeafStatus.STOP), (("a", "b"), {"max_turns": 2}, 102 / 4, LeafStatus.LENGTH),
    (("a", "b" * 40), {"turn_tokens": 30}, 101 / 4, LeafStatus.LENGTH),
    (("a", "b" * 400), {}, 101 / 4, LeafStatus.LENGTH),
])  # fmt: skip
def test_a_judge_rewards_however_a_conversation_ends(engine, turns, options, reward, status) -> None:
    script = lambda before: turns[min(before.count("<assistant>"), 1)]  # noqa: E731
    tree = talk(engine, script, EnvironmentTurns(Judged, **options))
    assert list(tree.meta["given_rewards"].values()) == [reward]
    assert list(tree.status) == [status]


def test_a_judge_whose_work_a_checkpoint_lost_is_asked_again() -> None:
    talk = _Talk(Judged(None), judging=False)
    talk.judge((0,))
    talk.environment.judge()  # under way when the checkpoint is made
    program = EnvironmentTurns(Judged)
    program._talks = {(0,): talk}
    state = program.state_dict({})
    again = EnvironmentTurns(Judged)
    again.context, again._prepare = {"messages": []}, lambda: None
    again.load_state_dict(state)
    (repeated,) = again.repeated(GroupState(1, 0, 0, 0, 1), [(0,)])
    assert repeated.function(*repeated.arguments) == 100 / 4
