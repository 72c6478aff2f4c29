"""Configurations, prompt files and verifiers as nobody meant them: a run is refused in one sentence, or it goes on.

``make attack`` runs these with thousands of cases. What each finding of earlier campaigns was is an example here or,
where it takes a whole run, a test beside the code: `tests/engine/app/test_preflight.py` and `test_failures.py`,
`tests/engine/model/test_load.py`, `tests/engine/rewards/test_hostile.py`.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rolltree.engine.app.cli import main
from rolltree.engine.app.config import load_config, resolved_toml
from rolltree.engine.app.keys import config_keys
from rolltree.engine.errors import UserError
from rolltree.engine.rewards import RewardItem, RewardPool
from rolltree.engine.settings import Place, RewardConfig, TrainConfig
from rolltree.engine.tasks import read_problems

from ..engine.rewards.test_hostile import HOSTILE, alive
from ..support.fresh import copied
from ..support.tiny import write_job

LISTS = tuple(f"{key.key}." for key in config_keys() if key.type == "list of tables")
KEYS = [key for key in config_keys() if key.type != "list of tables" and not key.key.startswith(LISTS)]
COUNTS = st.integers(-2, 300)  # where larger ones ask for what takes hours, and are no mistake
TEXTS = st.text(max_size=40) | st.sampled_from(
    ["", "\0", "/", "..", "a" * 300, "\u2028", "x.py:f", ":", "a/b", "{prompt}", "cpu", "mine.py:judge", "-", "ü" * 130]
)
NUMBERS = (
    COUNTS
    | st.sampled_from([2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, -(2**63), 10**30, 10**3000])
    | st.floats()
    | st.sampled_from([1e10, 1e39, 1e308, 5e-324, -0.0])
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    NUMBERS | TEXTS | st.booleans() | st.dates() | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def near(key: str, kind: str) -> st.SearchStrategy[Any]:
    """Values of the key's own type more often than not."""
    if kind.startswith('"'):
        own: st.SearchStrategy[Any] = st.sampled_from([part.strip().strip('"') for part in kind.split("|")])
    else:
        plain: dict[str, st.SearchStrategy[Any]] = {
            "integer": COUNTS,
            "number": st.floats(0, 2),
            "string": TEXTS,
            "boolean": st.booleans(),
        }
        plain["table"] = st.dictionaries(st.text(max_size=8), VALUES, max_size=3)
        own = plain[kind] if kind in plain else st.lists(VALUES, max_size=3)
    return own | own | VALUES


CHANGES = st.lists(
    st.sampled_from(KEYS).flatmap(lambda key: st.tuples(st.just(key.key), near(key.key, key.type))),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A run that would work, in a working directory of its own."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_job(directory)
        text = (directory / "tiny.toml").read_text().replace('verifier = "reward.py:judge"', 'verifier = "exact"')
        (directory / "tiny.toml").write_text(text.replace(f"{directory}/", ""))
        (directory / "mine.py").write_text(HOSTILE)
        os.chdir(directory)
        try:
            yield directory
        finally:
            os.chdir(before)


def campaign(cases: int) -> settings:
    return settings(max_examples=cases, suppress_health_check=list(HealthCheck), database=None)


def check_sentence(error: BaseException | str) -> None:
    message = str(error)
    assert message
    assert "\n" not in message
    assert len(message) < 1500, message
    message.encode()


@copied
def working(home: Path) -> dict[str, Any]:
    data = load_config(home / "tiny.toml").model_dump(mode="json", exclude_none=True)
    data["output_dir"] = "runs"
    data["model"]["path"] = str(home / "model")
    return data


def toml_of(home: Path, changes: list[tuple[str, Any]]) -> str:
    """The working run with some keys changed; what TOML itself cannot say is written as text that tries."""
    data = working(home)
    for key, value in changes:
        *tables, leaf = key.split(".")
        table = data
        for name in tables:
            if not isinstance(table.get(name), dict):
                table[name] = {}
            table = table[name]
        table[leaf] = value
    return tomli_w.dumps(data)


def load(text: str, *overrides: str) -> TrainConfig | None:
    """The configuration, None where it is refused in a sentence; nothing else may happen."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        try:
            return load_config(file.name, overrides)
        except UserError as error:
            check_sentence(error)
            return None


@pytest.mark.slow
def test_any_value_of_any_key_loads_or_is_refused(home: Path, cases: int) -> None:
    loaded = []

    @campaign(max(cases, 50))
    @given(CHANGES)
    @example([("seed", 2**32)])
    @example([("name", "a" * 300)])
    @example([("name", "\0")])
    @example([("output_dir", "a\0b")])
    @example([("rollout.top_k", 3_000_000_000)])
    @example([("rollout.kv_tokens", 2**40)])
    @example([("rollout.program_options", {"a": {"b": [float("nan")]}})])
    @example([("trainer.lr", float("nan"))])
    @example([("reward.timeout_s", 1e10)])
    @example([("evaluation.problems", 10**30)])
    @example([("rollout.stop", [datetime.date(2026, 1, 2)])])
    def attack(changes: list[tuple[str, Any]]) -> None:
        try:
            text = toml_of(home, changes)
        except ValueError:  # an integer too long for Python to print
            text = f"seed = {'9' * 5000}"
        config = load(text)
        if config is not None:
            again = load(resolved_toml(config))
            assert again == config
            loaded.append(changes)

    attack()
    assert len(loaded) >= max(cases, 50) // 8  # not only what is refused


@pytest.mark.parametrize("depth", [30, 300, 3000])
def test_absurd_depth(depth: int) -> None:
    for opened, closed in (("[", "]"), ("{a=", "}")):
        for text in (f"x = {opened * depth}1{closed * depth}", f"[x]\ny = {opened * depth}", "[" + "a." * depth + "a]"):
            assert load(text) is None
        assert load('name = "x"', "--rollout.program_options.a", f"{opened * depth}1{closed * depth}") is None


def test_what_takes_a_parser_minutes_is_refused_at_once(home: Path) -> None:
    """A part more of a key costs as much as all those before it."""
    many = "a." * 10_000
    begin = time.process_time()
    for text in (f"{many}a = 1", f"[{many}a]", f"x = {{{many}a = 1}}", '"a".' * 10_000 + "a = 1", f'x = "{many}"'):
        assert load(text) is None
        assert load('name = "x"', "--rollout.program_options.a", text) is None
    assert load(f'name = "{"x" * 300_000}"') is None
    assert time.process_time() - begin < 20  # minutes, if it were parsed
    for text, said in ((f"\n{many}a = 1", "line 2 has more than 1000 dots"), ("#" * 300_000, "exceeds 256 KiB")):
        (home / "long.toml").write_text(text)
        with pytest.raises(UserError, match=said):
            load_config(home / "long.toml")
        (home / "long.toml").unlink()


@pytest.mark.slow
def test_any_text_as_a_file_or_an_override(home: Path, cases: int) -> None:
    good = toml_of(home, [])
    keys = st.sampled_from([key.key for key in KEYS])
    overrides = st.lists(
        st.tuples(keys, TEXTS | VALUES.map(str)).map(lambda pair: f"--{pair[0]}={pair[1]}"), max_size=3
    )

    @campaign(max(cases, 50))
    @given(st.integers(0, len(good)), st.integers(0, 30), st.text(max_size=20), overrides)
    @example(0, 0, "", ['--rollout.stop=["a"]'])
    @example(0, 0, "", ["--seed=" + "9" * 5000])
    @example(0, 0, "", ["--name=\udcff"])
    @example(0, 0, "x = " + "9" * 5000, [])
    @example(0, 0, "x = 0x" + "f" * 5000, [])
    def attack(at: int, cut: int, put: str, given: list[str]) -> None:
        with contextlib.suppress(UnicodeEncodeError):  # hypothesis's text holds half a character: no file can
            load(good[:at] + put + good[at + cut :], *given)
        load(good, *given)

    attack()
    stopped = load(good, '--rollout.stop=["a", "b"]')
    assert stopped is not None
    assert stopped.rollout.stop == ["a", "b"]


@pytest.mark.slow
def test_dry_run_of_anything_writes_nothing(home: Path, cases: int) -> None:
    """The model, the tokenizer, the tasks, the program and the verifier are tried too; still a sentence at most."""
    before = sorted(p for p in home.rglob("*") if "__pycache__" not in p.parts)

    codes = set()

    @campaign(max(cases // 2, 12))
    @given(CHANGES)
    @example([])
    @example([("rollout.program", "eptree"), ("rollout.program_options", {})])
    @example([("data.path", "/nowhere.jsonl"), ("data.tasks", [])])
    @example([("algorithm.objective_options", {"eps_high": [1]})])
    @example([("rollout.program_options", {"segment_tokens": "a"})])
    @example([("output_dir", "\u00fc" * 130)])  # more bytes than a name may have
    @example([("output_dir", "a/" * 3000)])
    @example([("model.path", "\u00fc" * 130)])
    @example([("data.path", "\u00fc" * 130), ("data.tasks", [])])
    @example([("reward.verifier", "\u00fc" * 130 + ".py:f")])
    def attack(changes: list[tuple[str, Any]]) -> None:
        try:
            text = toml_of(home, changes)
        except ValueError:
            return
        (home / "attack.toml").write_text(text)
        out, error = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
                code = main(["train", "attack.toml", "--dry-run"])
        finally:
            (home / "attack.toml").unlink()
        assert code in (0, 2), error.getvalue()
        codes.add(code)
        if code == 2:
            said = [line for line in error.getvalue().splitlines() if line.startswith("rolltree: ")]
            assert len(said) == 1, error.getvalue()
            check_sentence(said[0])
        assert "Traceback" not in error.getvalue()
        assert sorted(p for p in home.rglob("*") if "__pycache__" not in p.parts) == before

    attack()
    assert codes == {0, 2}


ROWS = st.lists(
    st.dictionaries(st.sampled_from(["prompt", "answer", "more"]), TEXTS | VALUES.map(str), min_size=1), max_size=6
)


def test_any_prompts_file_is_read_exactly_or_refused(home: Path, cases: int) -> None:
    @campaign(max(cases, 50))
    @given(ROWS, st.booleans(), st.binary(max_size=3))
    @example([{"prompt": "a\u2028b\u0085c\x1d", "answer": "1"}], False, b"")
    @example([{"prompt": "\ud800", "answer": "1"}], True, b"")
    def attack(rows: list[dict[str, str]], ascii_only: bool, noise: bytes) -> None:
        text = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows)
        (home / "p.jsonl").write_bytes(text.encode("utf-8", "replace") + noise)
        try:
            found = read_problems(Place(str(home / "p.jsonl"), "data.path"), "prompt", "answer").rows
        except UserError as error:
            check_sentence(error)
            return
        if not noise:
            read = [json.loads(line) for line in text.encode("utf-8", "replace").decode().split("\n") if line]
            assert [(p.text, p.entry["answer"]) for p in found] == [(row["prompt"], row["answer"]) for row in read]

    attack()
    for text in ("[" * 100_000, '{"prompt": ' + "9" * 5000 + "}", '{"prompt": 1, "answer": 2}', "3", '""', "null"):
        (home / "p.jsonl").write_text(text)
        with pytest.raises(UserError) as caught:
            read_problems(Place(str(home / "p.jsonl"), "data.path"), "prompt", "answer")
        check_sentence(caught.value)


ACTS = {  # what a verifier does, and whether its item has a verdict
    "plain": 1.0, "low": 1.0, "fork": 1.0, "child": 1.0, "session": 1.0, "daemon": 1.0, "value 0.25": 0.25,
    "value 1e39": None, "all": None, "close": None, "exit": None, "kill": None, "group": None, "segfault": None,
    "unprintable": None, "surrogate": None, "daemon hang": None,
}  # fmt: skip


def test_hostile_verifiers_harm_only_their_own_item(home: Path, cases: int) -> None:
    @campaign(max(cases // 12, 2))
    @given(st.lists(st.sampled_from(sorted(ACTS)), min_size=1, max_size=6), st.integers(1, 2))
    def attack(acts: list[str], workers: int) -> None:
        pids = home / "pids"
        pids.write_text("")
        config = RewardConfig(verifier=f"{home / 'mine.py'}:judge", workers=workers, timeout_s=3.0)
        with RewardPool(config) as pool:
            results = pool.score([RewardItem(act, {"pids": str(pids)}) for act in acts])
            keepers = [worker.process.pid for worker in pool._workers]
        assert [r.value for r in results] == [ACTS[act] for act in acts]
        assert all(r.value is not None or r.reason for r in results)
        deadline = time.monotonic() + 5  # those of replaced workers end on their own time
        started = [*keepers, *(int(word) for word in pids.read_text().split())]
        while any(map(alive, started)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(alive, started))
        pids.unlink()

    attack()
