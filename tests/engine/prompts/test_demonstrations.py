"""Runs on given responses alone: supervised fine-tuning, conversations, weights, and preference pairs of a file."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolltree.engine import Orchestrator, UserError, load_config
from rolltree.engine.app.assembly.run import build
from rolltree.engine.data.segment import Origin
from rolltree.engine.prompts.demonstrations import Demonstrations

from ...support.tiny import beside
from ..learn.test_learner import Console

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ALONE = (
    "--trainer.prompts_per_step=0", "--data.tasks=[]", "--evaluation.problems=0", "--evaluation.every=0",
    "--rollout.program=flat", "--rollout.program_options={}", "--algorithm.advantage=group_norm",
    "--checkpoint.every=1",
)  # fmt: skip
SFT = '--algorithm.terms=[{name="sft",objective="sft",select="demonstrated"}]'
DPO = '--algorithm.terms=[{name="dpo",pairs="chosen_and_rejected",loss_options={beta=0.3}}]'


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def train(toml: Path, folder: Path, *keys: str, steps: int = 2) -> tuple[list[Any], Orchestrator]:
    config = load_config(toml, [*ALONE, f"--trainer.steps={steps}", f"--output_dir={folder}", *keys])
    run = build(config, console=Console())
    run.run()
    return [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()][1:], run


def logprobs(folder: Path, ids: list[int], model: Any = None) -> torch.Tensor:  # [T - 1]
    """Log-probs of a text's tokens after the first, by Transformers alone."""
    model = model or AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.check(but=1)
def test_a_run_without_rollouts_is_supervised_fine_tuning(toml: Path, tmp_path: Path) -> None:
    """Two tables in one step; the loss is the mean over the tokens of both, each with its weight."""
    folder, tokenizer = toml.parent / "model", AutoTokenizer.from_pretrained(toml.parent / "model")
    plain = [{"prompt": f"{a} + 2 =", "response": f"{a + 2}"} for a in range(3)]
    weighted = [
        {"prompt": "1 + 1 =", "response": "2", "w": 0.5},
        {"prompt": "1 + 3 =", "response": "4", "w": [0.0, 2.0]},
    ]
    tables = (
        f'--demonstrations=[{{name="a",path="{write(tmp_path / "a.jsonl", plain)}",per_step=3}},'
        f'{{name="b",path="{write(tmp_path / "b.jsonl", weighted)}",per_step=2,weight_key="w"}}]'
    )
    rows, run = train(toml, tmp_path, tables, SFT)
    total, count = 0.0, 0
    for row in plain + weighted:
        prompt = tokenizer(f"{row['prompt']}\n")["input_ids"] if "{prompt}\n" in _template(toml) else None
        prompt = prompt or tokenizer(_template(toml).replace("{prompt}", row["prompt"]))["input_ids"]
        answer = [*tokenizer(row["response"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        weights = torch.tensor(row.get("w", 1.0), dtype=torch.float64).expand(len(answer))
        total -= float((weights * logprobs(folder, prompt + answer)[-len(answer) :]).sum())
        count += int((weights > 0).sum())
    assert rows[0]["sft/pg_loss"] == pytest.approx(total / count, rel=1e-4)
    assert rows[1]["sft/pg_loss"] < rows[0]["sft/pg_loss"]
    assert rows[0]["actor/grad_norm"] > 0
    assert "actor/pg_loss" not in rows[0]
    assert "reward/mean" not in rows[0] or rows[0]["reward/mean"] is None
    assert not [name for name in run.options.directory.glob("rollouts/*") if name.stat().st_size > 5000]
    assert run.buffer.open == {}


def _template(toml: Path) -> str:
    return load_config(toml).data.template


@pytest.mark.check
def test_only_the_table_that_a_term_names_is_trained_on(toml: Path, tmp_path: Path) -> None:
    """The other table's weights are those of another run: its rows change nothing."""
    one = write(tmp_path / "one.jsonl", [{"prompt": "1 + 1 =", "response": "2"}])
    found = []
    for name, response in (("x", "7"), ("y", "8 8")):
        two = write(tmp_path / f"{name}.jsonl", [{"prompt": "2 + 2 =", "response": response}])
        tables = f'--demonstrations=[{{name="a",path="{one}",per_step=1}},{{name="b",path="{two}",per_step=1}}]'
        term = '--algorithm.terms=[{name="sft",objective="sft",select="demonstrated",select_options={of="a"}}]'
        rows, _ = train(toml, tmp_path / name, tables, term)
        found.append([row["sft/pg_loss"] for row in rows])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_offline_dpo_is_its_formula(toml: Path, tmp_path: Path) -> None:
    """-log sigmoid(beta ((S_w - Sref_w) - (S_l - Sref_l))), mean over the pairs, with a reference of other weights."""
    folder, tokenizer = toml.parent / "model", AutoTokenizer.from_pretrained(toml.parent / "model")
    other = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    other.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    pairs = [{"prompt": f"{a} + 2 =", "response": f"{a + 2}", "worse": f"{a} {a}"} for a in range(4)]
    table = f'--demonstrations={{path="{write(tmp_path / "pairs.jsonl", pairs)}",per_step=4,rejected_key="worse"}}'
    rows, _ = train(toml, tmp_path, table, DPO, f"--roles.reference.path={tmp_path}/other")
    losses, margins, policy = [], [], AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "other", dtype=torch.float64)
    for row in pairs:
        margin = 0.0
        for text, sign in ((row["response"], 1), (row["worse"], -1)):
            prompt = tokenizer(_template(toml).replace("{prompt}", row["prompt"]))["input_ids"]
            answer = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            sums = [logprobs(folder, prompt + answer, m)[-len(answer) :].sum() for m in (policy, reference)]
            margin += sign * float(sums[0] - sums[1])
        margins.append(0.3 * margin)
        losses.append(-torch.nn.functional.logsigmoid(torch.tensor(0.3 * margin)).item())
    assert rows[0]["dpo/margins"] == pytest.approx(sum(margins) / 4, rel=1e-3)
    assert rows[0]["actor/loss"] == pytest.approx(sum(losses) / 4, rel=1e-3)
    assert rows[1]["actor/loss"] < rows[0]["actor/loss"]


@pytest.mark.check
def test_hypo_adds_the_kl_of_rollouts_whatever_their_reward(toml: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": f"{a} + 2 =", "response": f"{a + 2}", "worse": f"{a} {a}"} for a in range(4)]
    table = f'--demonstrations={{path="{write(tmp_path / "pairs.jsonl", pairs)}",per_step=4,rejected_key="worse"}}'
    keys = ["--recipe=hypo", "--trainer.prompts_per_step=3", "--trainer.lr=1e-2", "--trainer.updates_per_step=2"]
    plain = beside(toml, "plain", algorithm={"objective": None})
    config = load_config(plain, [*ALONE[2:], *keys, "--trainer.steps=2", f"--output_dir={tmp_path}", table])
    run = build(config, console=Console())
    run.run()
    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()][1:]
    assert rows[1]["actor/kl_loss"] > 0  # the policy has left its reference
    assert rows[1]["filter/unseen_groups"] == 0  # groups of equal rewards count
    assert rows[1]["dpo/margins"] > rows[0]["dpo/margins"]
    assert rows[1]["actor/pg_loss"] == pytest.approx(0.0, abs=1e-6)


def chat_reader(toml: Path, path: str, **keys: Any) -> list[Any]:
    tokenizer = AutoTokenizer.from_pretrained(toml.parent / "model")
    tokenizer.chat_template = CHAT
    tokenizer.add_tokens(["</s>"], special_tokens=True)
    tokenizer.eos_token = "</s>"
    options = "".join(f', {key}="{value}"' for key, value in keys.items())
    table = f'--demonstrations={{path="{path}"{options}}}'
    config = load_config(toml, [*ALONE, "--data.chat=true", "--data.template={prompt}", table, SFT])
    return [tokenizer, Demonstrations(config.demonstrations, config.data, tokenizer, 0).next()]


def test_of_a_conversation_what_the_assistant_says_is_trained_on(toml: Path, tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "1 + 1 ="},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": "2"},
    ]
    whole = write(tmp_path / "whole.jsonl", [{"messages": talk}])
    parted = write(tmp_path / "parted.jsonl", [{"prompt": talk[:1], "response": talk[1:]}])
    tokenizer, trees = chat_reader(toml, whole, messages_key="messages")
    tree = trees[0]
    given = tree.origin == Origin.INJECTED
    assert tokenizer.decode(tree.token_id[given]) == "3</s>2</s>"
    text = tokenizer.decode(tree.token_id)
    assert text == tokenizer.apply_chat_template(talk, tokenize=False).removesuffix("\n")
    assert not tree.loss_mask.any()
    again = chat_reader(toml, parted)[1][0]
    assert again.token_id.tolist() == tree.token_id.tolist()
    assert again.origin.tolist() == tree.origin.tolist()


@pytest.mark.parametrize(
    ("row", "keys", "said"),
    [
        ({"messages": [{"role": "user", "content": "1"}]}, {"messages_key": "messages"}, "needs a list of messages"),
        (
            {"messages": [{"role": "assistant", "content": "1"}]},
            {"messages_key": "messages"},
            "one of the assistant among them, and others before it",
        ),
        (
            {"messages": [{"role": role, "content": "1"} for role in ("user", "assistant", "user")]},
            {"messages_key": "messages"},
            "begins and ends with one of the assistant",
        ),
        (
            {
                "prompt": [{"role": "user", "content": "1"}],
                "response": [{"role": "assistant", "content": "2", "tool_calls": [{"name": "f"}]}],
            },
            {},
            "a message with `tool_calls`; write the call into its text",
        ),
        ({"prompt": "1", "response": None}, {}, "needs a response"),
        ({"prompt": "1", "response": "2", "w": -1}, {"weight_key": "w"}, r"needs 2 weights \(finite, at least 0"),
        ({"prompt": "1", "response": "2", "w": [1]}, {"weight_key": "w"}, r"needs 2 weights .* it has 1\."),
        ({"prompt": "1", "response": "2"}, {"rejected_key": "worse"}, r"response \(demonstrations\.rejected_key\)"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_demonstration_is_refused(
    toml: Path, tmp_path: Path, row: dict[str, Any], keys: dict[str, str], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        chat_reader(toml, write(tmp_path / "row.jsonl", [row]), **keys)


def test_lengths_are_those_of_the_demonstrations(toml: Path, tmp_path: Path) -> None:
    """The model has 128 positions; where nothing is sampled, no room is left for an answer."""
    short = write(tmp_path / "short.jsonl", [{"prompt": "1 + 1 =", "response": "2"}])
    keys = ["--data.max_prompt_tokens=200", "--trainer.max_tokens=512", "--trainer.steps=1"]
    train(toml, tmp_path, f'--demonstrations={{path="{short}"}}', SFT, *keys, steps=1)
    long = write(tmp_path / "long.jsonl", [{"prompt": "1 + 1 =", "response": "2 " * 80}])
    with pytest.raises(UserError, match=r"longest demonstration has \d+ tokens, over the model's positions, 128"):
        train(toml, tmp_path / "b", f'--demonstrations={{path="{long}"}}', SFT, *keys)
    with pytest.raises(UserError, match=r"over trainer\.max_tokens, 100; leave it out, or raise trainer\.max_tokens\."):
        train(toml, tmp_path / "c", f'--demonstrations={{path="{long}"}}', SFT, "--trainer.max_tokens=100")


def test_it_does_not_go_on_with_other_rows(toml: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": f"{a} + 2 =", "response": f"{a + 2}"} for a in range(5)])
    tables = f'--demonstrations=[{{name="a",path="{path}",per_step=2}},{{name="b",path="{path}",per_step=3}}]'
    _, run = train(toml, tmp_path, tables, SFT, steps=1)
    state = copy.deepcopy(run.demonstrations.state_dict())
    state["b"]["digest"] = "other"
    with pytest.raises(UserError, match="other rows than"):
        run.demonstrations.load_state_dict(state)
