"""Every form of file, folder and pattern that `data.path` takes, and what is refused in one sentence."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rolltree.engine import UserError, load_config
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.cli import main
from rolltree.engine.settings import Place
from rolltree.engine.tasks import read_problems
from rolltree.engine.tasks.images import content_of

from ..learn.test_learner import Console
from .reading import content, pairs, read, sums, write

FORMS = ["parquet", "jsonl", "json", "csv", "jsonl.gz", "json.gz", "csv.gz", "jsonl.zst", "json.zst", "csv.zst"]


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_the_same_rows_and_ids(form: str, toml: Path, tokenizer: Any, tmp_path: Path) -> None:
    rows = sums(7)
    write(tmp_path, {f"a.b.{form}": rows})
    found = read(toml, tokenizer, f"--data.path={tmp_path}/a.b.{form}")
    assert found.pairs == pairs(rows)
    assert found.ids == [f"a.b/{n}" for n in range(7)]
    assert {prompt.task for prompt in found.source.known} == {"a.b"}
    assert found.source.said == f"7 rows of '{tmp_path}/a.b.{form}'"


@pytest.mark.parametrize("form", ["parquet", "jsonl", "json"])
def test_numbers_stay_numbers_and_those_of_csv_are_texts(form: str, toml: Path, tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "1", "answer": 72, "more": {"a": [1, None]}}, {"prompt": "2", "answer": 7, "more": {"a": []}}]
    write(tmp_path, {f"n.{form}": rows})
    found = read(toml, tokenizer, f"--data.path={tmp_path}/n.{form}").source.known
    assert [prompt.entry for prompt in found] == rows
    assert [type(prompt.entry["answer"]) for prompt in found] == [int, int]
    (tmp_path / "n.csv").write_text("prompt,answer,more\n1,072,\n2,7.0,NULL\n")
    found = read(toml, tokenizer, f"--data.path={tmp_path}/n.csv").source.known
    assert [(prompt.entry["answer"], prompt.entry["more"]) for prompt in found] == [("072", ""), ("7.0", "NULL")]


def test_csv_as_spreadsheets_write_it(toml: Path, tokenizer: Any, tmp_path: Path) -> None:
    long = "x" * 200_000  # more than the csv module takes by default
    text = f'\ufeffprompt,answer,note\r\n"1,\r\n2 ""+""",3,{long}\r\n\r\n4,5,\r\n'
    (tmp_path / "s.csv").write_bytes(text.encode())
    found = read(toml, tokenizer, f"--data.path={tmp_path}/s.csv")
    assert found.pairs == [('1,\r\n2 "+"', "3"), ("4", "5")]
    assert found.source.known[0].entry["note"] == long


def test_json_lines_keep_the_name_json(toml: Path, tokenizer: Any, tmp_path: Path) -> None:
    rows = sums(3)
    (tmp_path / "l.json").write_bytes(b"\xef\xbb\xbf" + content("l.jsonl", rows))
    assert read(toml, tokenizer, f"--data.path={tmp_path}/l.json").pairs == pairs(rows)


def test_several_files_come_in_the_order_of_their_names(toml: Path, tokenizer: Any, tmp_path: Path) -> None:
    names = ["part-10.jsonl", "part-2.jsonl", "part-00.jsonl"]
    write(tmp_path / "set", {name: sums(2, 10 * n) for n, name in enumerate(names)})
    write(tmp_path / "set", {"other.jsonl.gz": sums(1, 90), ".hidden.jsonl": sums(1, 91), ".git/x.jsonl": sums(1, 92)})
    (tmp_path / "set" / "README.md").write_text("not a row")
    ordered = sums(2, 20) + sums(2, 0) + sums(2, 10)
    found = read(toml, tokenizer, f"--data.path={tmp_path}/set/part-*.jsonl")
    assert found.pairs == pairs(ordered)
    assert found.ids[:3] == ["set/part-00.jsonl/0", "set/part-00.jsonl/1", "set/part-10.jsonl/0"]
    assert {prompt.task for prompt in found.source.known} == {"set"}
    assert found.source.said == f"6 rows of '{tmp_path}/set/part-*.jsonl' (3 files)"
    for path in (tmp_path / "set", f"{tmp_path}/set/"):
        folder = read(toml, tokenizer, f"--data.path={path}")
        assert folder.pairs == pairs(sums(1, 90) + ordered)
        assert folder.ids[1:] == found.ids


def test_shards_of_equal_names_have_ids_of_their_own(toml: Path, tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path, {"s/a/p.jsonl": sums(2), "s/b/p.jsonl": sums(2, 5), "s/p.jsonl": sums(1, 9)})
    found = read(toml, tokenizer, f"--data.path={tmp_path}/s/**/*.jsonl")
    assert found.ids == ["s/a/p.jsonl/0", "s/a/p.jsonl/1", "s/b/p.jsonl/0", "s/b/p.jsonl/1", "s/p.jsonl/0"]
    assert found.pairs == pairs(sums(2) + sums(2, 5) + sums(1, 9))


def test_a_row_of_a_shard_is_named_with_its_shard(toml: Path, tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path, {"a.jsonl": sums(3), "b.jsonl": [*sums(1), {"prompt": "?"}]})
    with pytest.raises(UserError, match=r"Row 1 of '.*/b\.jsonl' has no column 'answer'"):
        read(toml, tokenizer, f"--data.path={tmp_path}/*.jsonl")


def test_pictures_lie_beside_their_shard(toml: Path, tokenizer: Any, tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path, {f"{name}/rows.jsonl": [{"prompt": name, "answer": "1", "image": "p.png"}]})
        (tmp_path / name / "p.png").write_bytes(name.encode())
    rows = read_problems(Place(f"{tmp_path}/*/rows.jsonl", "data.path"), "prompt", "answer", "image").rows
    assert [[content_of(each) for each in row.images] for row in rows] == [[b"a"], [b"b"]]


def test_held_out_problems_and_demonstrations_take_the_same_forms(toml: Path, tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path, {"train/a.json": sums(3), "held/x.csv.zst": sums(2, 50), "held/y.csv.zst": sums(2, 60)})
    given = [{"prompt": f"{n} =", "response": str(n)} for n in range(4)]
    write(tmp_path, {"given/1.jsonl.gz": given[:1], "given/2.jsonl.gz": given[1:]})
    tables = f'--demonstrations=[{{path="{tmp_path}/given/*.gz"}}]'
    found = read(toml, tokenizer, f"--data.path={tmp_path}/train", f"--data.eval_path={tmp_path}/held", tables, held=4)
    assert [prompt.problem for prompt in found.held] == [row["prompt"] for row in sums(2, 50) + sums(2, 60)]
    assert found.pairs == pairs(sums(3))
    assert found.given.prompts == {row["prompt"] for row in given}


GZ = gzip.compress(content("x.jsonl", sums(50)))
ZST = bytes(pa.compress(content("x.jsonl", sums(50)), codec="zstd", asbytes=True))


@pytest.mark.parametrize(
    ("files", "path", "says"),
    [
        ({"a.jsonl.gz": GZ[:-9]}, "a.jsonl.gz", "a.jsonl.gz' (data.path) is damaged or cut off: Compressed file ended"),
        ({"a.jsonl.gz": GZ[:40] + b"!" + GZ[41:]}, "a.jsonl.gz", "is damaged or cut off"),
        ({"a.jsonl.gz": b"{}"}, "a.jsonl.gz", "is damaged or cut off: Not a gzipped file"),
        ({"a.jsonl.zst": ZST[:-9]}, "a.jsonl.zst", "is damaged or cut off: Truncated compressed stream"),
        ({"a.jsonl.zst": b"{}"}, "a.jsonl.zst", "is damaged or cut off"),
        ({"a.jsonl.gz": gzip.compress(b"")}, "a.jsonl.gz", "has no rows"),
        ({"a.parquet.gz": GZ}, "a.parquet.gz", "is not .parquet, .jsonl, .json or .csv"),
        ({"a.txt": b"1"}, "a.txt", "is not .parquet, .jsonl, .json or .csv"),
        ({"a.csv": b"prompt,answer\n"}, "a.csv", "has no rows"),
        ({"a.csv": b"1 + 1,2\n2 + 2,4\n"}, "a.csv", "'prompt' (data.prompt_key); its first line names 1 + 1, 2"),
        ({"a.csv": b"prompt,answer,\n1,2,3\n"}, "a.csv", "one of them is empty or comes twice"),
        ({"a.csv": b"prompt,answer,answer\n1,2,3\n"}, "a.csv", "prompt, answer, answer; give each a name of its own"),
        ({"a.csv": b'prompt,answer\n"1\n+",2\n3\n'}, "a.csv", "ends in line 4 of '{dir}/a.csv' (data.path) has 1 fi"),
        ({"a.csv": b"prompt,answer\n1, so 2,3\n"}, "a.csv", "line 2 of '{dir}/a.csv' (data.path) has 3 fields and the"),
        ({"a.csv": b'prompt,answer\n"1,2\n'}, "a.csv", "a.csv' (data.path) is not csv: unexpected end of data"),
        ({"a.csv": b"prompt,answer\n\xff,2\n"}, "a.csv", "is not in UTF-8"),
        ({"a.json": b'{\n "rows": []\n}'}, "a.json", "is one JSON object over several lines; give an array"),
        ({"a.json": b'[{"prompt": "1"}, 5]'}, "a.json", "Item 1 of the array in '{dir}/a.json' (data.path) is not"),
        ({"a.json": b'[{"prompt": "1"}'}, "a.json", "a.json' (data.path) is not a JSON array: Expecting"),
        ({"a.json": b"[" * 9000}, "a.json", "is not a JSON array"),
        ({"a.json": b"[]"}, "a.json", "has no rows"),
        ({"a.jsonl": b"[]"}, "a.jsonl", "Line 1 of '{dir}/a.jsonl' (data.path) is not a JSON object"),
        ({}, "*.jsonl", "No file matches '{dir}/*.jsonl' (data.path)"),
        ({}, "", "The folder '{dir}' (data.path) holds no data itself; give a folder with .parquet"),
        ({"README.md": b"", ".x.jsonl": b"{}"}, "", "holds no data itself"),
        ({"m/a.jsonl": b"{}", "n/a.jsonl": b"{}"}, "", "holds no data itself; name a folder in it, such as '{dir}/m'"),
        ({"a.jsonl": b"{}", "n/o/a.jsonl": b"{}"}, "", "data in folders of its own too ('{dir}/n/o'); give a pattern"),
        ({"a.jsonl": b"{}", "b.csv": b"{}"}, "", "holds files of several forms, .csv and .jsonl"),
        ({"a.jsonl": b"{}", "b.csv": b"{}"}, "*", "holds files of several forms, .csv and .jsonl"),
        ({"a.jsonl": b"{}", "README.md": b""}, "*", "includes '{dir}/README.md', which is not .parquet"),
        ({"train-0.jsonl": b"{}", "test-0.jsonl": b"{}"}, "",
         "'test-0.jsonl'); name the files of one with a pattern, such as "
         "'{dir}/*train*.jsonl*'"),
        ({"x_train.jsonl": b"{}", "x_val.jsonl": b"{}"}, "", "holds several parts of a set"),
        ({"a.jsonl": b'{"prompt": "1", "answer": "2"}', "b.jsonl": b""}, "", "b.jsonl' (data.path) has no rows; rem"),
    ],
)  # fmt: skip
def test_what_is_refused(
    files: dict[str, bytes], path: str, says: str, toml: Path, tokenizer: Any, tmp_path: Path
) -> None:
    home = tmp_path / "d"
    home.mkdir()
    for name, raw in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(raw)
    with pytest.raises(UserError) as caught:
        read(toml, tokenizer, f"--data.path={home / path}")
    message = str(caught.value)
    assert says.replace("{dir}", str(home)) in message, message
    assert "\n" not in message
    assert message.endswith(".")


@pytest.mark.parametrize("path", ["", "*", "*.jsonl"])
def test_a_shard_that_is_not_there_is_not_passed_over(path: str, toml: Path, tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path / "d", {"a.jsonl": sums(2)})
    (tmp_path / "d" / "b.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"b\.jsonl' \(data\.path\) is no file or links to none"):
        read(toml, tokenizer, f"--data.path={tmp_path}/d/{path}")
    (tmp_path / "d" / "b.jsonl").unlink()
    os.mkfifo(tmp_path / "d" / "b.jsonl")
    with pytest.raises(UserError, match=r"b\.jsonl' \(data\.path\) is no file or links to none"):
        read(toml, tokenizer, f"--data.path={tmp_path}/d/{path}")


@pytest.mark.parametrize(
    ("row", "keys", "says"),
    [
        ({"question": "1", "answer": "2"}, (), 'it has answer, question; set data.prompt_key = "question".'),
        ({"problem": "1", "answer": "2"}, (), 'set data.prompt_key = "problem".'),
        ({"messages": [], "answer": "2"}, (), 'set data.prompt_key = "messages".'),
        ({"problem": "1", "question": "1"}, (), 'set data.prompt_key = "question" or data.prompt_key = "problem".'),
        ({"text": "1", "answer": "2"}, (), "it has answer, text."),
        ({"prompt": "1", "solution": "2"}, (), 'it has prompt, solution; set data.answer_key = "solution".'),
        ({"prompt": "1", "ground_truth": "2"}, (), 'set data.answer_key = "ground_truth".'),
        ({"prompt": "1", "answer": "2"}, ("--data.answer_key=gold",), 'set data.answer_key = "answer".'),
        ({"prompt": "1", "answer": "2", "images": []}, ("--data.image_key=image",), 'set data.image_key = "images".'),
    ],
)  # fmt: skip
def test_usual_names_of_columns_are_suggested_and_not_read(
    row: dict[str, Any], keys: tuple[str, ...], says: str, toml: Path, tokenizer: Any, tmp_path: Path
) -> None:
    write(tmp_path, {"a.jsonl": [row]})
    with pytest.raises(UserError) as caught:
        read(toml, tokenizer, f"--data.path={tmp_path}/a.jsonl", *keys)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "1", "response": "2"}, '(demonstrations.prompt_key); it has question, response; set '
         'demonstrations.prompt_key = "question".'),
        ({"prompt": "1", "completion": "2"}, '(demonstrations.response_key); it has completion, prompt; set '
         'demonstrations.response_key = "completion".'),
        ({"messages": []}, 'set demonstrations.messages_key = "messages".'),
    ],
)  # fmt: skip
def test_columns_of_demonstrations_are_suggested_by_their_own_keys(
    row: dict[str, Any], says: str, toml: Path, tokenizer: Any, tmp_path: Path
) -> None:
    write(tmp_path, {"a.jsonl": [row], "p.jsonl": sums(2)})
    with pytest.raises(UserError) as caught:
        read(toml, tokenizer, f"--data.path={tmp_path}/p.jsonl", f'--demonstrations=[{{path="{tmp_path}/a.jsonl"}}]')
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            ("--data.split=train",),
            "data.split chooses a part of a set on the hub, and '{dir}/a.jsonl' (data.path)",
        ),
        (("--data.subset=main",), "data.subset chooses a part of a set on the hub"),
        (("--data.eval_split=test",), "data.eval_split chooses a part of a set on the hub"),
        (("--data.eval_path={dir}/a.jsonl", "--data.eval_subset=x"), "data.eval_subset chooses"),
        (("--data.eval_subset=x",), "give `data.eval_path` or `data.eval_split` too"),
        (('--demonstrations=[{path="{dir}/a.jsonl",split="train"}]',), "demonstrations.split chooses a part"),
    ],
)
def test_parts_of_local_files_are_refused(
    keys: tuple[str, ...], says: str, toml: Path, tokenizer: Any, tmp_path: Path
) -> None:
    write(tmp_path, {"a.jsonl": sums(4)})
    given = [key.replace("{dir}", str(tmp_path)) for key in keys]
    with pytest.raises(UserError) as caught:
        read(toml, tokenizer, f"--data.path={tmp_path}/a.jsonl", *given, held=1)
    assert says.replace("{dir}", str(tmp_path)) in str(caught.value)


def test_a_part_of_nothing_is_refused(toml: Path) -> None:
    for key in ("subset", "split", "eval_split"):
        with pytest.raises(UserError, match=f"`data.{key}` chooses a part of a set on the hub; give `data"):
            load_config(toml, [f"--data.{key}=main"])


@pytest.mark.check
def test_the_plan_says_how_many_rows_there_are_and_where(
    toml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {"set/1.csv": sums(5), "set/2.csv": sums(4, 20), "held.json": sums(3, 50)})
    keys = ["--data.tasks=[]", f"--data.path={tmp_path}/set", "--evaluation.problems=2", "--dry-run"]
    assert main(["train", str(toml), *keys]) == 0
    line = f"prompts            9 rows of '{tmp_path}/set' (2 files); 7 to train on, 2 held out\n"
    assert line in capsys.readouterr().out
    assert main(["train", str(toml), *keys, f"--data.eval_path={tmp_path}/held.json"]) == 0
    said = capsys.readouterr().out
    assert f"'{tmp_path}/set' (2 files); 9 to train on, 2 held out of '{tmp_path}/held.json'\n" in said
    for model in ("--model.path=nobody/nothing", "--model.path=/nowhere"):  # one from the hub, one that is made
        made = [f"--model.create={toml.parent}/reward.py:judge"] if model.endswith("/nowhere") else []
        assert main(["train", str(toml), *keys, f"--data.eval_path={tmp_path}/held.json", model, *made]) == 0
        said = capsys.readouterr().out
        assert f"prompts            9 rows of '{tmp_path}/set' (2 files)\n" in said
        assert f"held-out problems  3 rows of '{tmp_path}/held.json'\n" in said
    assert main(["train", str(toml), *keys, "--data.path=nowhere.jsonl"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


ONE_STEP = (
    "--data.tasks=[]", "--evaluation.problems=0", "--evaluation.every=0", "--trainer.prompts_per_step=2",
    "--rollout.program=flat", "--rollout.program_options={}", "--algorithm.advantage=group_norm",
    "--checkpoint.every=1",
)  # fmt: skip


def train(toml: Path, folder: Path, *keys: str, resume: bool = False) -> list[dict[str, Any]]:
    config = load_config(toml, [*ONE_STEP, f"--output_dir={folder}/runs", f"--data.path={folder}/set", *keys])
    build(config, console=Console(), resume=resume).run()
    return [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_on_shards_resumes_with_the_same_shards_only(toml: Path, tmp_path: Path, without_report: None) -> None:
    write(tmp_path / "set", {f"{n}.jsonl": sums(3, 10 * n) for n in range(3)})
    train(toml, tmp_path, "--trainer.steps=1")
    os.rename(tmp_path / "set" / "0.jsonl", tmp_path / "set" / "9.jsonl")
    with pytest.raises(UserError, match=r"other training rows, or rows of files with other names, than '.*/set' has"):
        train(toml, tmp_path, "--trainer.steps=2", resume=True)
    os.rename(tmp_path / "set" / "9.jsonl", tmp_path / "set" / "0a.jsonl")  # the order is the same, the ids are not
    with pytest.raises(UserError, match=r"rows of files with other names"):
        train(toml, tmp_path, "--trainer.steps=2", resume=True)
    os.rename(tmp_path / "set" / "0a.jsonl", tmp_path / "set" / "0.jsonl")
    write(tmp_path / "set", {"3.jsonl": sums(1, 70)})
    with pytest.raises(UserError, match=r"made with 9 training rows in '.*/set' \(data\.path\) and there are 10 now"):
        train(toml, tmp_path, "--trainer.steps=2", resume=True)
    (tmp_path / "set" / "3.jsonl").unlink()
    assert len(train(toml, tmp_path, "--trainer.steps=2", resume=True)) == 3
