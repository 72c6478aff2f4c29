"""`examples/qwen3_gsm8k.toml`: all of it that needs neither a GPU nor the hub, on rows of GSM8K's form."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rolltree.engine.app.assembly.methods import Methods
from rolltree.engine.app.assembly.sampling import rollout_program, sampling_params
from rolltree.engine.app.config import load_config
from rolltree.engine.prompts.prompts import held_out
from rolltree.engine.prompts.sources import PromptSource
from rolltree.engine.rewards import RewardItem, RewardPool

from ...support.hub import Hub, clients_of, serving

CARD = b"""---
configs:
- config_name: main
  data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]
- config_name: socratic
  data_files: [{split: train, path: socratic/train-*}]
---
"""
EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen3_gsm8k.toml"


def chatty_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = "{% for m in messages %}user: {{ m.content }}\n{% endfor %}assistant: "
    return wrapped


def test_the_configuration_is_one_the_engine_takes() -> None:
    config = load_config(EXAMPLE)
    Methods.make(config)
    rollout_program(config.rollout)
    sampling_params(config.rollout)
    depth, segment = (config.rollout.program_options[key] for key in ("max_depth", "segment_tokens"))
    assert depth * segment >= config.rollout.max_new_tokens


@pytest.mark.check
def test_rows_of_gsm8k_become_prompts_and_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"README.md": CARD}
    for name, rows in (("train", 3), ("test", 2)):
        table = {
            "question": [f"{name}: Mia has {i} apples and buys 3 more. How many?" for i in range(rows)],
            "answer": [f"She has {i} + 3 = <<{i}+3={i + 3}>>{i + 3}.\n#### {i + 3}" for i in range(rows)],
        }
        pq.write_table(pa.table(table), tmp_path / "rows.parquet")
        files[f"main/{name}-00000-of-00001.parquet"] = (tmp_path / "rows.parquet").read_bytes()
    config = load_config(EXAMPLE, ["--evaluation.problems=2", "--reward.workers=1"])
    tokenizer = chatty_tokenizer()
    with serving(Hub({"openai/gsm8k": files})) as hub:
        clients_of(hub.url, tmp_path, monkeypatch)
        held = held_out(config.data, config.evaluation.problems, tokenizer)
        prompts = PromptSource(config.data, tokenizer, config.seed, held).next(3)
    assert [prompt.problem[:4] for prompt in held] == ["test", "test"]
    assert all("'Answer:'" in prompt.text and prompt.text.endswith("assistant: ") for prompt in prompts)
    with RewardPool(config.reward, config.data.tasks) as pool:
        answers = [int(prompt.entry["answer"].rpartition(" ")[2]) for prompt in prompts]
        right = pool.score(
            [RewardItem(f"... so\nAnswer: {a}.00", p.entry) for a, p in zip(answers, prompts, strict=True)]
        )
        wrong = pool.score([RewardItem(f"Answer: {a + 1}", p.entry) for a, p in zip(answers, prompts, strict=True)])
    assert [result.value for result in right] == [1, 1, 1]
    assert [result.value for result in wrong] == [0, 0, 0]
