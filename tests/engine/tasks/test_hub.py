"""Sets and files on the hub, served by a small server on this machine, and what is there without a network."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from rolltree.engine import UserError
from rolltree.engine.settings import Place
from rolltree.engine.tasks import hub as reader
from rolltree.engine.tasks import read_problems
from rolltree.engine.tasks.images import content_of

from ...support.hub import Hub, clients_of, serving
from .reading import content, pairs, read, sums, write
from .test_files import train

CARD = b"""---
configs:
- config_name: main
  data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]
- config_name: socratic
  data_files: [{split: train, path: socratic/*}]
---
"""
NAMES = ("--data.path=openai/gsm8k", "--data.subset=main")


def asked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with the columns of GSM8K."""
    return [{"question": row["prompt"], "answer": f"So it is so.\n#### {row['answer']}"} for row in rows]


NULLS = [{"prompt": "1", "answer": 2, "more": {"a": None}}, {"prompt": "2", "answer": None}]
SETS = {
    "openai/gsm8k": {
        "README.md": CARD,
        "main/train-00000-of-00002.parquet": content("x.parquet", asked(sums(5))),
        "main/train-00001-of-00002.parquet": content("x.parquet", asked(sums(4, 5))),
        "main/test-00000-of-00001.parquet": content("x.parquet", asked(sums(3, 50))),
        "socratic/all.parquet": content("x.parquet", asked(sums(2, 80))),
    },
    "me/lines": {
        "data/a.jsonl": content("x.jsonl", NULLS),
        "data/b.csv.gz": content("x.csv.gz", sums(2)),
        "data/c/c.jsonl.zst": content("x.jsonl.zst", sums(2)),
    },
    "me/one": {"train.jsonl": content("x.jsonl", sums(6)), "README.md": b"A set.\n"},
    "me/secret": {"README.md": b"", "train.jsonl": content("x.jsonl", sums(6))},
}  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub at the addresses that the clients in this process use, and empty caches."""
    with serving(Hub(dict(SETS), gated={"me/secret"})) as hub:
        clients_of(hub.url, tmp_path / "cache", monkeypatch)
        yield hub


@pytest.mark.check(but=1)
@pytest.mark.parametrize("path", ["openai/gsm8k", "hf://datasets/openai/gsm8k", "hf://datasets/openai/gsm8k@main"])
def test_a_set_has_the_rows_of_all_its_shards(path: str, hub: Hub, toml: Path, tokenizer: Any) -> None:
    keys = [f"--data.path={path}", "--data.subset=main", "--data.prompt_key=question"]
    found = read(toml, tokenizer, *keys, "--data.split=train", "--data.eval_split=test", held=3)
    assert [(p, a.rpartition(" ")[2]) for p, a in found.pairs] == pairs(sums(9))
    assert found.ids == [f"gsm8k/train/{n}" for n in range(9)]
    assert {prompt.task for prompt in found.source.known} == {"gsm8k"}
    assert [prompt.problem for prompt in found.held] == [row["prompt"] for row in sums(3, 50)]
    assert [prompt.id for prompt in found.held] == [f"gsm8k/test/{n}" for n in range(3)]
    assert found.source.said == f"9 rows of '{path}' (main, train)"


@pytest.mark.check(but=1)
@pytest.mark.parametrize(
    ("split", "rows"),
    [("test", sums(3, 50)), ("train[2:7]", sums(5, 2)), ("train[:50%]", sums(4)),
     ("test+train[:1]", sums(3, 50) + sums(1))],
)  # fmt: skip
def test_parts_of_splits(split: str, rows: list[dict[str, Any]], hub: Hub, toml: Path, tokenizer: Any) -> None:
    found = read(toml, tokenizer, *NAMES, "--data.prompt_key=question", f"--data.split={split}")
    assert [(p, a.rpartition(" ")[2]) for p, a in found.pairs] == pairs(rows)
    assert len(set(found.ids)) == len(rows)


@pytest.mark.check
def test_values_stay_what_the_set_has(hub: Hub, toml: Path, tokenizer: Any) -> None:
    shown = io.BytesIO()
    Image.new("RGB", (2, 2), "red").save(shown, "PNG")
    picture = {"bytes": shown.getvalue(), "path": "a.png"}
    rows = [{"prompt": "1", "answer": 72, "of": {"a": [1, None]}, "image": picture, "images": [picture]}]
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "answer": datasets.Value("int64"),
         "of": {"a": datasets.List(datasets.Value("int32"))}, "image": datasets.Image(),
         "images": datasets.List(datasets.Image())}
    )  # fmt: skip
    file = io.BytesIO()
    datasets.Dataset.from_list(rows, features).to_parquet(file)
    hub.sets["me/typed"] = {"data/train.parquet": file.getvalue()}
    for key in ("image", "images"):
        (problem,) = read_problems(Place("me/typed", "data.path"), "prompt", "answer", key).rows
        assert [content_of(image) for image in problem.images] == [picture["bytes"]]
        assert {name: problem.entry[name] for name in ("prompt", "answer", "of")} == {
            name: rows[0][name] for name in ("prompt", "answer", "of")
        }
    mixed = [{"prompt": "1", "answer": "2", "of": 1}, {"prompt": "2", "answer": "3", "of": {"b": [True]}}]
    file = io.BytesIO()
    datasets.Dataset.from_list(mixed, on_mixed_types="use_json").to_parquet(file)
    hub.sets["me/mixed"] = {"train.parquet": file.getvalue()}
    (first, second) = read_problems(Place("me/mixed", "data.path"), "prompt", "answer").rows
    assert [first.entry, second.entry] == mixed
    hub.sets["me/zeros"] = {"train.csv": b"prompt,answer\none,072\n"}
    answers = [
        read_problems(Place(path, "data.path"), "prompt", "answer").rows[0].entry["answer"]
        for path in ("hf://datasets/me/zeros/train.csv", "me/zeros")
    ]
    assert answers == ["072", 72]  # `datasets` guesses types of csv, as docs/data.md says
    (first, second) = read_problems(Place("hf://datasets/me/lines/data/a.jsonl", "data.path"), "prompt", "answer").rows
    assert [first.entry, second.entry] == NULLS


@pytest.mark.check(but=2)
@pytest.mark.parametrize(
    ("path", "rows", "ids"),
    [
        ("openai/gsm8k/main/test-00000-of-00001.parquet", asked(sums(3, 50)), "test-00000-of-00001/0"),
        ("openai/gsm8k@main/main/train-*.parquet", asked(sums(9)), "main/train-00000-of-00002.parquet/0"),
        ("openai/gsm8k/socratic", asked(sums(2, 80)), "socratic/all.parquet/0"),
        ("me/lines/data/b.csv.gz", sums(2), "b/0"),
        ("me/lines/**/*.zst", sums(2), "c/c.jsonl.zst/0"),
        ("me/one/", sums(6), "one/train/0"),
    ],
)
def test_files_of_a_set(path: str, rows: list[dict[str, Any]], ids: str, hub: Hub, toml: Path, tokenizer: Any) -> None:
    key = "question" if "question" in rows[0] else "prompt"
    found = read(toml, tokenizer, f"--data.path=hf://datasets/{path}", f"--data.prompt_key={key}")
    assert found.pairs == [(row[key], row["answer"]) for row in rows]
    assert found.ids[0] == ids


@pytest.mark.check(but=4)
@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("--data.path=openai/gsm8k",), "needs a subset; set data.subset to one of main, socratic."),
        (("--data.path=openai/gsm8k", "--data.subset=min"), "has no subset 'min'; set data.subset to one of main, soc"),
        (NAMES, "has several splits; set data.split to one of train, test."),
        ((*NAMES, "--data.split=tset"), "has no split 'tset'; set data.split to one of train, test, or to a part"),
        ((*NAMES, "--data.split=train+dev[:3]"), "has no split 'dev'"),
        ((*NAMES, "--data.split=train[:3"), "cannot be read: Unrecognized instruction format: train[:3."),
        ((*NAMES, "--data.split=test[:20]"), "'test[:20]' of 'openai/gsm8k' (data.split) has 3 rows, fewer"),
        ((*NAMES, "--data.split=test[3:]"), "corresponds to no data"),
        ((*NAMES, "--data.split=train"), "Row 0 of 'openai/gsm8k' (main, train) has no column 'prompt' "
         "(data.prompt_key); "
         'it has answer, question; set data.prompt_key = "question".'),
        (("--data.path=openai/gsm9k",), "is not found: there is no such file or folder here, and the hub has no set "
         "'openai/gsm9k' that you may read; correct the name, or log in with `hf auth login`"),
        (("--data.path=me/secret",), "'me/secret' (data.path) is a gated set on the hub; ask for access at https://hugging"),
        (("--data.path=hf://datasets/me/secret/train.jsonl",), "is a gated set on the hub"),
        (("--data.path=hf://datasets/openai/gsm8k@v9", "--data.subset=main"), "names a revision 'v9' that the"),
        (("--data.path=hf://datasets/me/one/tset.jsonl",), "the set 'me/one' has no 'tset.jsonl'; correct the address"),
        (("--data.path=hf://datasets/me/one/*.csv",), "No file matches 'hf://datasets/me/one/*.csv' (data.path)"),
        (("--data.path=hf://datasets/me/lines/date",), "The folder 'hf://datasets/me/lines/date' (data.path) holds"),
        (("--data.path=hf://datasets/me/lines/data",), "has data in folders of its own too ('hf://datasets/me/lines/data/c')"),
        (("--data.path=hf://datasets/openai/gsm8k/main",), "holds several parts of a set ('train-00000-of-"),
        (("--data.path=hf://models/me/one",), "is no address of data on the hub; give hf://datasets/OWNER/NAME"),
        (("--data.path=gsm8k",), "There is no prompts file 'gsm8k' (data.path); give a .parquet"),
        (("--data.path=me/lines.jsonl",), "There is no prompts file 'me/lines.jsonl' (data.path)"),
        (("--data.path=hf://datasets/me/one/train.jsonl", "--data.split=train"), "data.split chooses a part of"),
    ],
)  # fmt: skip
def test_what_the_hub_does_not_have(keys: tuple[str, ...], says: str, hub: Hub, toml: Path, tokenizer: Any) -> None:
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        read(toml, tokenizer, *keys)
    assert says in str(caught.value), caught.value
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 10


@pytest.mark.check
def test_a_set_that_is_damaged_on_the_hub(hub: Hub, toml: Path, tokenizer: Any) -> None:
    hub.sets["me/cut"] = {"train.parquet": SETS["openai/gsm8k"]["socratic/all.parquet"][:-20]}
    with pytest.raises(UserError, match=r"'me/cut' \(data\.path\) cannot be read: .*Parquet"):
        read(toml, tokenizer, "--data.path=me/cut")


def test_what_is_here_comes_before_the_hub(
    hub: Hub, toml: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {"me/one/a.jsonl": sums(2, 30)})
    assert read(toml, tokenizer, "--data.path=me/one").pairs == pairs(sums(2, 30))
    with pytest.raises(
        UserError, match=r"data\.split .* leave it out, or write hf://datasets/me/one for the set on the"
    ):
        read(toml, tokenizer, "--data.path=me/one", "--data.split=train")
    (tmp_path / "me/one/a.jsonl").unlink()
    with pytest.raises(UserError, match=r"holds no data itself; .*, or write hf://datasets/me/one for the set"):
        read(toml, tokenizer, "--data.path=me/one")
    assert hub.asked == []


@pytest.mark.check
def test_held_out_problems_and_demonstrations_come_from_the_hub(hub: Hub, toml: Path, tokenizer: Any) -> None:
    given = '--demonstrations=[{path="openai/gsm8k",subset="socratic",prompt_key="question",response_key="answer"}]'
    files = ["--data.path=hf://datasets/openai/gsm8k/main/train-*", "--data.prompt_key=question"]
    held_out = ["--data.eval_path=openai/gsm8k", "--data.eval_subset=main", "--data.eval_split=test[:2]"]
    found = read(toml, tokenizer, *files, *held_out, given, held=2)
    assert len(found.pairs) == 9
    assert [prompt.problem for prompt in found.held] == [row["prompt"] for row in sums(2, 50)]
    assert found.given.prompts == {row["prompt"] for row in sums(2, 80)}
    with pytest.raises(UserError, match=r"has no split 'x'; set data\.eval_split to one of train, test"):
        read(toml, tokenizer, *files, *held_out[:2], "--data.eval_split=x", held=2)
    with pytest.raises(
        UserError, match=r"'openai/gsm8k' \(demonstrations\.path\) needs a subset; set demonstrations\.sub"
    ):
        read(toml, tokenizer, *files, '--demonstrations=[{path="openai/gsm8k"}]')


@pytest.mark.check
def test_a_slice_of_a_large_set_fetches_no_more_than_it_needs(
    hub: Hub, toml: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are those that reading all of the set gives, and a slice that runs out is refused as there."""
    shards = {f"train-{n:05}-of-00006.parquet": content("x.parquet", sums(3, 3 * n)) for n in range(6)}
    hub.sets["me/large"] = {**shards, "test.parquet": content("x.parquet", sums(2, 50))}
    monkeypatch.setattr(reader, "LARGE", 10)
    found = read(toml, tokenizer, "--data.path=me/large", "--data.split=train[1:5]")
    fetched = {request.rpartition("/")[2] for request in hub.asked if request.startswith("GET /datasets/")}
    assert set(list(shards)[:2]) <= fetched
    assert not {*list(shards)[3:], "test.parquet"} & fetched
    with pytest.raises(UserError, match=r"'train\[4:20\]' of 'me/large' \(data\.split\) has 14 rows, fewer than 16"):
        read(toml, tokenizer, "--data.path=me/large", "--data.split=train[4:20]")
    monkeypatch.setattr(reader, "LARGE", 1 << 30)
    whole = read(toml, tokenizer, "--data.path=me/large", "--data.split=train[1:5]")
    assert (whole.pairs, whole.ids) == (found.pairs, found.ids) == (pairs(sums(4, 1)), found.ids)
    assert found.source.state_dict()["digests"] == whole.source.state_dict()["digests"]
    monkeypatch.setattr(reader, "LARGE", 10)
    untyped = read(toml, tokenizer, "--data.path=me/one", "--data.split=train[1:3]")  # its types follow from all rows
    assert untyped.pairs == pairs(sums(2, 1))
    hub.asked.clear()  # the set is in the cache now, and is read from there
    assert read(toml, tokenizer, "--data.path=me/large", "--data.split=train[1:5]").pairs == found.pairs
    assert not any(".parquet" in request for request in hub.asked)


@pytest.mark.check
def test_without_a_network_the_caches_serve(
    hub: Hub, toml: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [*NAMES, "--data.split=train", "--data.prompt_key=question"]
    file = "--data.path=hf://datasets/me/lines/data/b.csv.gz"
    before = [read(toml, tokenizer, *sets), read(toml, tokenizer, file)]
    commit = hub.commit("openai/gsm8k")
    for way in ("fails", "gone"):
        if way == "fails":
            hub.failing = True
        else:
            clients_of("http://127.0.0.1:9", tmp_path / "cache", monkeypatch)  # nothing listens there
        began = time.monotonic()
        after = [read(toml, tokenizer, *sets), read(toml, tokenizer, file)]
        assert [(each.pairs, each.ids) for each in after] == [(each.pairs, each.ids) for each in before]
        at = [f"--data.path=hf://datasets/openai/gsm8k@{commit[:12]}", *sets[1:]]
        assert read(toml, tokenizer, *at).pairs == before[0].pairs
        for keys, says in (
            ((*sets, "--data.subset=socratic"), "'openai/gsm8k' (data.path) is not here, the hub cannot be "
             "reached, and the cache of `datasets` does not have it: Couldn't find cache for openai/gsm8k for conf"),
            (("--data.path=me/one",), "'me/one' (data.path) is not here, the hub cannot be reached, and the cache of"),
            (("--data.path=hf://datasets/openai/gsm8k@abc", *sets[1:]), f"and the cache has revision {commit}"),
            (("--data.path=hf://datasets/me/one/train.jsonl",), "and the hub's cache does not have the file"),
            (("--data.path=hf://datasets/me/lines/data/*.gz",), "and which files there are is not known without it"),
        ):  # fmt: skip
            with pytest.raises(UserError) as caught:
                read(toml, tokenizer, *keys)
            assert says in str(caught.value), caught.value
            assert "\n" not in str(caught.value)
        assert time.monotonic() - began < 8


@pytest.mark.slow
def test_a_run_resumes_with_the_rows_that_it_had(
    hub: Hub, toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_report: None
) -> None:
    set_of = [*NAMES, "--data.split=train", "--data.prompt_key=question"]
    train(toml, tmp_path, *set_of, "--trainer.steps=1")
    clients_of("http://127.0.0.1:9", tmp_path / "cache", monkeypatch)  # nothing listens there
    assert len(train(toml, tmp_path, *set_of, "--trainer.steps=2", resume=True)) == 3
    clients_of(hub.url, tmp_path / "cache", monkeypatch)
    changed = {"main/train-00001-of-00002.parquet": content("x.parquet", asked(sums(4, 6)))}
    hub.sets["openai/gsm8k"] = SETS["openai/gsm8k"] | changed
    with pytest.raises(UserError, match=r"other training rows, .* than 'openai/gsm8k' \(main, train\) has now"):
        train(toml, tmp_path, *set_of, "--trainer.steps=3", resume=True)


@pytest.mark.check
def test_a_hub_that_never_answers_is_not_waited_for(
    toml: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "WAIT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        clients_of(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, monkeypatch)
        began = time.monotonic()
        with pytest.raises(UserError, match="the hub cannot be reached"):
            read(toml, tokenizer, "--data.path=me/one")
        assert time.monotonic() - began < 5


def test_what_datasets_is_needed_for(hub: Hub, toml: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        UserError, match=r"is a set on the hub, which `datasets` reads; install it with `pip install 'rollt"
    ):
        read(toml, tokenizer, "--data.path=me/one")
    assert len(read(toml, tokenizer, "--data.path=hf://datasets/me/one/train.jsonl").pairs) == 6


PLAN = """
import sys
from rolltree.engine.app.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_the_command_line_reads_a_mirror_and_without_it_its_cache(toml: Path, tmp_path: Path) -> None:
    """A mirror is named by the variable HF_ENDPOINT, as for all clients of the hub."""
    keys = [*NAMES, "--data.split=train", "--data.eval_split=test", "--data.prompt_key=question", "--data.tasks=[]"]
    wanted = "'openai/gsm8k' (main, train); 9 to train on, 3 held out of 'openai/gsm8k' (main, test)"

    def plan(**environment: str) -> tuple[int, str, str]:
        given = [*keys, "--evaluation.problems=3", "--dry-run"]
        done = subprocess.run(
            [sys.executable, "-c", PLAN, "train", str(toml), *given], capture_output=True, text=True, timeout=120,
            env=os.environ | {"HF_HOME": str(tmp_path)} | environment,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    with serving(Hub(dict(SETS))) as hub:
        code, out, error = plan(HF_ENDPOINT=hub.url)
    assert (code, wanted in out, error) == (0, True, "")
    code, out, _ = plan(HF_HUB_OFFLINE="1")
    assert (code, wanted in out) == (0, True)
