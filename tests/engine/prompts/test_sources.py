"""Prompts: order, cursor, held-out problems, and files that are not what was said."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rolltree.engine.errors import UserError
from rolltree.engine.prompts.prompts import Prompt, held_out
from rolltree.engine.prompts.sources import PromptSource
from rolltree.engine.settings import DataConfig
from rolltree.engine.tasks import GymProblems

SUMS = ({"name": "chain_sum", "options": {"min_terms": 2, "max_terms": 3, "max_digits": 1}},)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_)


def held_out_of(tokenizer: PreTrainedTokenizerFast, problems: int, **data: Any) -> list[Prompt]:
    return held_out(DataConfig.model_validate(data), problems, tokenizer)


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def numbered(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"problem {i}", "answer": str(i)} for i in range(count)]


def source(tokenizer: PreTrainedTokenizerFast, seed: int = 0, held: list[Prompt] | None = None, **data: Any) -> Any:
    return PromptSource(DataConfig.model_validate(data), tokenizer, seed, held or [])


def test_generated_prompts_follow_from_the_seed_and_the_cursor(tokenizer: PreTrainedTokenizerFast) -> None:
    first = source(tokenizer, tasks=SUMS, template="Q: {prompt}\nA:")
    prompts = first.next(5) + first.next(3)
    assert source(tokenizer, tasks=SUMS, template="Q: {prompt}\nA:").next(8) == prompts
    assert source(tokenizer, 1, tasks=SUMS, template="Q: {prompt}\nA:").next(8) != prompts
    for prompt in prompts:
        assert prompt.text == f"Q: {prompt.problem}\nA:"
        assert tokenizer.decode(prompt.token_ids) == prompt.text
        assert prompt.task == "chain_sum"
        assert prompt.entry["answer"]

    state = json.loads(json.dumps(first.state_dict()))
    following = first.next(4)
    again = source(tokenizer, tasks=SUMS, template="Q: {prompt}\nA:")
    again.load_state_dict(state)
    assert again.next(4) == following


def test_a_mixture_follows_its_weights() -> None:
    config = DataConfig.model_validate(
        {"tasks": [{"name": "chain_sum", "weight": 3}, {"name": "spell_backward", "weight": 1}]}
    )
    problems = GymProblems(config.tasks, [0])
    tasks = [problems[k] for k in range(400)]
    assert 0.68 < sum(p.task == "chain_sum" for p in tasks) / 400 < 0.82
    assert all(p.entry["task_index"] == (p.task == "spell_backward") for p in tasks)


def test_generators_never_hold_more_than_a_chunk() -> None:
    """`list_functions` makes a list as long as its size, `word_ladder` refuses a large one."""
    config = DataConfig.model_validate({"tasks": [{"name": "list_functions"}, {"name": "word_ladder"}]})
    problems = GymProblems(config.tasks, [0])
    found = [problems[k].text for k in (0, 1, 2000, 1_000_000_000, 0)]
    assert found[0] == found[4]
    assert len(set(found)) == 4


def test_neighbouring_chunks_do_not_repeat_each_other() -> None:
    """reasoning_gym seeds item i with seed + i: chunks with neighbouring seeds would overlap."""
    config = DataConfig.model_validate({"tasks": [{"name": "chain_sum"}]})
    problems = GymProblems(config.tasks, [0])
    texts = [problems[k].text for k in itertools.chain(range(900, 1024), range(1024, 1200))]
    assert len(set(texts)) > 0.95 * len(texts)


def test_held_out_problems_never_come_up(tokenizer: PreTrainedTokenizerFast) -> None:
    narrow = ({"name": "chain_sum", "options": {"min_terms": 2, "max_terms": 2, "max_digits": 1}},)  # 200 problems
    held = held_out_of(tokenizer, 120, tasks=narrow)
    questions = {prompt.problem for prompt in held}
    assert len(questions) == 120
    assert held_out_of(tokenizer, 120, tasks=narrow) == held
    given = source(tokenizer, held=held, tasks=narrow).next(500)
    assert not questions & {prompt.problem for prompt in given}

    everything = held_out_of(tokenizer, 200, tasks=narrow)
    with pytest.raises(UserError, match=r"evaluation\.problems"):
        source(tokenizer, held=everything, tasks=narrow).next(1)
    with pytest.raises(UserError, match="only 200 different"):
        held_out_of(tokenizer, 201, tasks=narrow)


def test_a_file_is_shuffled_anew_in_each_epoch(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = jsonl(tmp_path / "p.jsonl", numbered(10))
    held = held_out_of(tokenizer, 3, path=path)
    assert [p.problem for p in held] == ["problem 7", "problem 8", "problem 9"]
    stream = source(tokenizer, held=held, path=path)
    texts = [p.problem for p in stream.next(21)]
    epochs = [texts[:7], texts[7:14], texts[14:]]
    assert all(sorted(epoch) == [f"problem {i}" for i in range(7)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]

    middle = source(tokenizer, held=held, path=path)
    middle.next(10)
    resumed = source(tokenizer, held=held, path=path)
    resumed.load_state_dict(json.loads(json.dumps(middle.state_dict())))
    assert [p.problem for p in resumed.next(11)] == texts[10:]
    with pytest.raises(UserError, match="7 training rows"):
        source(tokenizer, path=path).load_state_dict(middle.state_dict())


@pytest.mark.parametrize(
    ("prompts", "wanted", "first", "last"),
    [
        ("AABC", 3, "ABC", "ABC"),
        ("ABAC", 2, "AB", "AC"),
        ("ABCCC", 3, "ABC", "ABC"),
        ("ABCAD", 3, "ABC", "CAD"),
        ("AAAAB", 2, "AB", "AB"),
        ("ABCD", 2, "AB", "CD"),
        ("AABBC", 1, "A", "C"),
    ],
)
def test_held_out_rows_that_repeat_count_once(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, prompts: str, wanted: int, first: str, last: str
) -> None:
    path = jsonl(tmp_path / "p.jsonl", [{"prompt": p, "answer": str(i)} for i, p in enumerate(prompts)])
    found = held_out_of(tokenizer, wanted, path=path, eval_path=path)
    assert "".join(p.problem for p in found) == first
    assert [p.entry["answer"] for p in found] == [str(prompts.index(p)) for p in first]
    assert "".join(p.problem for p in held_out_of(tokenizer, wanted, path=path)) == last
    different = len(set(prompts))
    with pytest.raises(UserError, match=f"only {different} different problems were found"):
        held_out_of(tokenizer, different + 1, path=path, eval_path=path)


TEMPLATES = [
    ("{{ raise_exception('no ' + messages[0].content) }}", "no c"),
    ("{{ messages[0].content + 1 }}", "can only concatenate str"),
    ("{{ messages[0].nothing.at_all }}", "has no attribute 'nothing'"),
    ("{{ 1 / 0 }}", "division by zero"),
    ("{% for %}", "Expected an expression"),
]


@pytest.mark.parametrize(("template", "said"), TEMPLATES)
def test_what_a_chat_template_cannot_write_is_told_by_its_row(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, template: str, said: str
) -> None:
    rows = [{"prompt": p, "answer": "1"} for p in "abc"]
    own = copy.deepcopy(tokenizer)
    own.chat_template = (
        "{% if messages[0].content == 'c' %}" + template + "{% endif %}{{ messages[0].content }}"
        if "for" not in template
        else template
    )
    with pytest.raises(
        UserError, match=rf"chat template cannot write the prompt 'p/{0 if 'for' in template else 2}'.*{said}"
    ):
        source(own, path=jsonl(tmp_path / "p.jsonl", rows), chat=True)


@pytest.mark.parametrize("text", ["{}\n", "\n{}\n", "{}\r\n{}", "{}", '{{"prompt": "\ufeff", "answer": 1}}\n{}'])
def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    text = text.format(*[json.dumps({"prompt": "a", "answer": "1"})] * 2)
    contents = []
    for begin in (b"", b"\xef\xbb\xbf"):
        (tmp_path / "p.jsonl").write_bytes(begin + text.encode())
        contents.append(source(tokenizer, path=str(tmp_path / "p.jsonl")).next(2))
    (tmp_path / "p.jsonl").write_bytes(
        b"\n".join(b"\xef\xbb\xbf" + line.encode() for line in text.split("\n"))
    )  # joined
    assert contents[0] == contents[1] == source(tokenizer, path=str(tmp_path / "p.jsonl")).next(2)
    for encoding in ("utf-16", "utf-16-be", "latin-1"):
        (tmp_path / "p.jsonl").write_bytes(f"\u00e4 {text}".replace("\ufeff", "").encode(encoding))
        with pytest.raises(UserError, match=r"is not in UTF-8.*save it in UTF-8"):
            source(tokenizer, path=str(tmp_path / "p.jsonl"))


def test_a_repeated_row_of_a_held_out_problem_is_held_out_too(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = jsonl(tmp_path / "p.jsonl", [*numbered(4), {"prompt": "problem 0", "answer": "0"}])
    stream = source(tokenizer, held=held_out_of(tokenizer, 1, path=path), path=path)
    assert sorted(p.problem for p in stream.next(3)) == ["problem 1", "problem 2", "problem 3"]


def test_parquet_columns_are_mapped_and_the_others_kept(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"question": ["a?", "b?"], "solution": ["1", "2"], "level": [3, 4]}), path)
    pq.write_table(pa.table({"question": ["c?"], "solution": ["5"], "level": [6]}), tmp_path / "test.parquet")
    data = {"path": str(path), "prompt_key": "question", "answer_key": "solution"}
    prompts = sorted(source(tokenizer, **data).next(2), key=lambda p: p.problem)
    assert [p.problem for p in prompts] == ["a?", "b?"]
    assert [p.entry["answer"] for p in prompts] == ["1", "2"]
    assert [p.entry["level"] for p in prompts] == [3, 4]
    (held,) = held_out_of(tokenizer, 1, eval_path=str(tmp_path / "test.parquet"), **data)
    assert held.problem == "c?"


def test_chat_template_is_applied_once(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = jsonl(tmp_path / "p.jsonl", numbered(1))
    with pytest.raises(UserError, match=r"data\.chat"):
        source(tokenizer, path=path, chat=True)
    chatty = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    chatty.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (prompt,) = source(chatty, path=path, chat=True, template="Solve: {prompt}").next(1)
    assert prompt.text == "<user>Solve: problem 0</s><assistant>"
    assert chatty.decode(prompt.token_ids) == prompt.text

    talk = [("system", "Be brief."), ("user", "1 + 1 ="), ("assistant", "2"), ("user", "And 2 more?")]
    messages = [{"role": role, "content": content, "name": None} for role, content in talk]
    path = jsonl(tmp_path / "talk.jsonl", [{"messages": messages, "answer": "4"}])
    data = {"path": path, "prompt_key": "messages"}
    (prompt,) = source(chatty, chat=True, **data).next(1)
    assert prompt.text == "".join(f"<{role}>{content}</s>" for role, content in talk) + "<assistant>"
    assert prompt.problem == "\n".join(f"{role}: {content}" for role, content in talk)
    named = [messages[0] | {"name": "Ada"}, *messages[1:]]
    with pytest.raises(UserError, match=r"message 0 \(system\) has 'name', which the chat template leaves out"):
        source(chatty, chat=True, **data | {"path": jsonl(tmp_path / "n.jsonl", [{"messages": named, "answer": "4"}])})
    for options in ({"chat": False}, {"chat": True, "template": "Solve: {prompt}"}):
        with pytest.raises(UserError, match=r"is a conversation, .* set data\.chat to true and leave data\.template"):
            source(chatty, **options, **data)
    for wrong, said in [
        ([{"role": "user"}], "is no conversation"),
        ([], "not the model's turn"),
        (messages[:3], "not the model's turn"),
    ]:
        path = jsonl(tmp_path / "wrong.jsonl", [{"messages": wrong, "answer": "4"}])
        with pytest.raises(UserError, match=said):
            source(chatty, path=path, prompt_key="messages", chat=True)


@pytest.mark.parametrize(
    ("name", "content", "needles"),
    [
        ("absent.jsonl", None, ["absent.jsonl", "data.path"]),
        ("p.txt", "a,b\n", ["p.txt", ".parquet", ".jsonl"]),
        ("p.csv", "a,b\n", ["p.csv", "no rows"]),
        ("p.jsonl", "", ["p.jsonl", "no rows"]),
        ("p.jsonl", '{"prompt": "a", "answer": "1"}\n{"prompt": \n', ["p.jsonl", "2"]),
        ("p.jsonl", '["a", "b"]\n', ["p.jsonl", "object"]),
        ("p.jsonl", '{"question": "a", "answer": "1"}\n', ["'prompt'", "data.prompt_key", "answer, question"]),
        ("p.jsonl", '{"prompt": "a", "gold": "1"}\n', ["'answer'", "data.answer_key", "gold, prompt"]),
        ("p.jsonl", '{"prompt": 5, "answer": "1"}\n', ["data.prompt_key", "0"]),
        ("p.jsonl", b'{"prompt": "\xff"}\n', ["p.jsonl"]),
        ("p.parquet", "this is no parquet", ["p.parquet", "parquet"]),
    ],
)
def test_bad_files_are_named_in_one_sentence(
    name: str,
    content: str | bytes | None,
    needles: list[str],
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as error:
        source(tokenizer, path=str(path))
    message = str(error.value)
    assert all(needle in message for needle in needles), message
    assert "\n" not in message


def test_a_long_prompt_is_named_and_never_cut(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [*numbered(3), {"prompt": "x" * 65, "answer": "1"}]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match=r"rows/3' is 65 tokens long.*max_prompt_tokens = 64"):
        source(tokenizer, path=path, max_prompt_tokens=64)
    assert len(source(tokenizer, path=path, max_prompt_tokens=65).next(4)) == 4
    with pytest.raises(UserError, match="max_prompt_tokens"):
        source(tokenizer, tasks=SUMS, max_prompt_tokens=10).next(1)


@pytest.mark.parametrize(
    ("task", "needle"),
    [
        ({"name": "chain_smu"}, "chain_smu"),
        ({"name": "chain_sum", "options": {"max_trems": 3}}, "max_trems"),
        ({"name": "chain_sum", "options": {"min_terms": 0}}, "min_terms"),
        ({"name": "chain_sum", "options": {"seed": 3}}, "seed"),
    ],
)
def test_an_unknown_task_or_option_is_named(
    task: dict[str, Any], needle: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(UserError, match=r"data\.tasks") as error:
        source(tokenizer, tasks=(task,))
    assert needle in str(error.value)


ROWS = """
class Rows:
    asked = 0

    def next(self, count):
        begin, self.asked = self.asked, self.asked + count
        return [{"prompt": f"problem {i}", "answer": str(i)} for i in range(begin, self.asked)]
"""


def test_a_source_without_state_goes_back_in_place(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """The source's rows come once; a run keeps those since its checkpoint, also if writing a further one failed."""
    (tmp_path / "rows.py").write_text(ROWS)
    made = source(tokenizer, source=f"{tmp_path}/rows.py:Rows")
    made.next(2)
    state = copy.deepcopy(made.state_dict())
    expected = made.next(5)
    made.state_dict()  # of a checkpoint that was not written
    for _ in range(2):
        made.load_state_dict(copy.deepcopy(state))
        assert made.next(1) == expected[:1]
        made.state_dict()
        assert made.next(4) == expected[1:]
    assert [prompt.entry["answer"] for prompt in made.next(2)] == ["7", "8"]
