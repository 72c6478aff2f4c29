"""Coding agents of npm, unmodified, with the settings of examples/coding_agents: two steps of a run, tokens exact.

They lie in build/agents/node_modules: `make agents`. A random model chooses between a call of the agent's shell and
answers, by its real log-probs; a verifier judges the last answer.
"""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.config import load_config
from rolltree.engine.app.console import Console
from rolltree.engine.rollout import EngineConfig, NativeEngine
from rolltree.engine.rollout.local import LocalSampler

from ...support import agents, chat_templates, harbor, serving
from ...support.tiny import ROOT
from .test_real_agents import call, one_of

pytestmark = [pytest.mark.agents, pytest.mark.timeout(1800)]
PROGRAMS = Path(os.environ.get("ROLLTREE_CODING_AGENTS", ROOT / "build" / "agents" / "node_modules" / ".bin"))
LOOK = {"command": "ls -la", "description": "look"}
AGENTS = {
    "codex": ("codex", call("exec_command", cmd="ls -la")),
    "opencode": ("opencode", call("bash", **LOOK)),
    "opencode_titled": ("opencode", call("bash", **LOOK)),
    "qwen_code": ("qwen", call("run_shell_command", **LOOK)),
}
TOML = """
name = "coding"
output_dir = "{folder}/runs"
[model]
path = "{folder}/model"
dtype = "float32"
[data]
path = "{folder}/problems.jsonl"
chat = true
[reward]
verifier = "{folder}/judge.py:judge"
workers = 1
[rollout]
program = "agent"
program_options = {{ command = ["sh", "{script}"], timeout_s = 300, roles = {roles}, same = {same} }}
n = 4
temperature = 4.0
max_new_tokens = 60000
kv_tokens = 400000
[algorithm]
objective = "grpo"
advantage = "group_norm"
[trainer]
steps = 2
prompts_per_step = 2
max_tokens = 131072
[evaluation]
problems = 0
"""
JUDGE = "def judge(response, entry):\n    return float('42' in response)\n"
ANSWERS = ["It is 42.", "The answer: 42.", "No.", "I do not know."]


def tokenizer() -> PreTrainedTokenizerFast:
    """Words of English and code, so that prompts have about as many tokens as with a real model's."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    letters, marks = pre_tokenizers.ByteLevel.alphabet(), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=8000, initial_alphabet=letters, special_tokens=marks, show_progress=False)
    inner.train([str(path) for path in (*ROOT.glob("docs/*.md"), *ROOT.glob("engine/**/*.py"))], trainer)
    words = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=marks[2], clean_up_tokenization_spaces=False)
    words.chat_template = chat_templates.template("qwen2_5")
    return words


def write(folder: Path, name: str) -> tuple[Path, PreTrainedTokenizerFast]:
    words, config = tokenizer(), serving.model().config
    config.vocab_size, config.max_position_embeddings = len(words), 131072
    config.eos_token_id = config.pad_token_id = words.eos_token_id
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    problems = [{"prompt": f"What is {n} times {42 // n}?", "answer": "42"} for n in (1, 2, 3, 6)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    (folder / "judge.py").write_text(JUDGE)
    script = ROOT / "examples" / "coding_agents" / f"{name}.sh"
    roles = ["title"] if name == "opencode_titled" else []
    same = tomllib.loads(script.with_name("same.toml").read_text())[name.removesuffix("_titled")]
    entries = ", ".join(f"{json.dumps(pattern)} = {json.dumps(text)}" for pattern, text in same.items())
    (folder / "run.toml").write_text(TOML.format(folder=folder, script=script, roles=roles, same=f"{{ {entries} }}"))
    return folder / "run.toml", words


@pytest.mark.parametrize("name", AGENTS)
def test_a_coding_agent_that_nobody_here_wrote(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, shell = AGENTS[name]
    if not (PROGRAMS / program).exists():
        pytest.skip(f"npm has not installed {program}")
    monkeypatch.setenv("PATH", f"{PROGRAMS}:{os.environ['PATH']}")
    toml, words = write(tmp_path, name)
    for row in trained(toml, words, [shell, *ANSWERS], monkeypatch):
        assert "agent/first_difference" not in row, "all episodes of a group begin with the same prompts"
        assert row["tree/token_ratio"] > 3


CONTAINED = """
mkdir -p "$HOME/.codex" && cp /settings/codex.toml "$HOME/.codex/config.toml"
exec /codex/bin/codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --disable multi_agent \\
    --config "model_providers.rolltree.base_url=\\"$OPENAI_BASE_URL\\"" "Sort words.txt."
"""


def test_codex_in_a_container(tmp_path: Path, podman: None) -> None:
    """Its program is in the image of busybox by a mount; there is no network, and the tests of the task reward it."""
    program = next(PROGRAMS.parent.glob("@openai/codex-linux-*/vendor/*/bin/codex"), None)
    if program is None:
        pytest.skip("npm has not installed codex")
    words, config = tokenizer(), serving.model().config
    config.vocab_size, config.max_position_embeddings = len(words), 131072
    config.eos_token_id = config.pad_token_id = words.eos_token_id
    engine = NativeEngine(Qwen3ForCausalLM(config).eval(), words, EngineConfig(page_size=16, kv_tokens=262144))
    mounts = {"/codex": program.parents[1], "/settings": ROOT / "examples" / "coding_agents"}
    volumes = [word for inside, here in mounts.items() for word in ("--volume", f"{here}:{inside}:ro")]
    container = harbor.OPTIONS | {"engine_args": [*harbor.ARGS, *volumes]}
    texts = [call("exec_command", cmd="sort -o words.txt words.txt"), "It is done."]
    params = {"allowed_token_ids": None, "prefix_allowed_tokens_fn": one_of(words, texts)}
    asked = agents.job(engine, 2, max_new_tokens=60000, **params)
    asked = replace(asked, context={**asked.context, "harbor": str(harbor.write_task(tmp_path, "sort-words"))})
    tree = agents.run(engine, asked, command=["sh", "-c", CONTAINED], container=container, timeout_s=600, calls=6)
    assert "errors" not in tree.meta, tree.meta["errors"]
    assert len(tree.meta["given_rewards"]) == 2
    assert tree.logical_tokens / tree.num_tokens > 1.9, "both begin with the same prompt"


def trained(
    toml: Path, words: PreTrainedTokenizerFast, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, float]]:
    """Run two steps of a model that says ``texts``, and return their metrics; each sampled token is trained once."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    allowed, sampled = one_of(words, texts), list[Any]()
    submit, step = LocalSampler.submit, LocalSampler.step

    def submitted(self: LocalSampler, jobs: Any) -> Any:
        return submit(
            self, [replace(job, params=replace(job.params, prefix_allowed_tokens_fn=allowed)) for job in jobs]
        )

    def stepped(self: LocalSampler, seconds: float) -> Any:
        done = step(self, seconds)
        sampled.extend(flight.tree for flight in done)
        return done

    monkeypatch.setattr(LocalSampler, "submit", submitted)
    monkeypatch.setattr(LocalSampler, "step", stepped)
    assert build(load_config(toml, []), console=Console()).run().steps == 2
    run = toml.parent / "runs" / "coding"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][1:]
    for row in rows:
        shown = ("agent/calls", "agent/branches", "tree/token_ratio", "agent/shared_ratio", "agent/first_difference")
        print({key: round(row[key], 3) for key in shown if key in row}, "prompt", row["prompt_length/mean"])
        assert row["rollout/failed"] == 0
        assert row["rollout/aborted_calls"] == 0
    wanted = [token for tree in sampled for token in tokens(tree.token_id, tree.behaviour_logprob, tree.leaf_prompt[0])]
    learned = []
    for file in sorted((run / "rollouts").iterdir()):
        for row in pq.read_table(file).to_pylist():
            ids, masked = np.array([*row["prompt_ids"], *row["response_ids"]]), np.array(row["loss_mask"], bool)
            logprobs = np.array([0.0] * len(row["prompt_ids"]) + row["behaviour_logprob"], np.float32)
            every = tokens(ids, logprobs, len(row["prompt_ids"]))
            learned += [token for token, is_trained in zip(every, masked, strict=True) if is_trained]
    assert sorted(learned) == sorted(wanted)
    print(f"{len(sampled)} calls, {len(wanted)} tokens sampled and trained")
    return rows


def tokens(ids: Any, logprobs: Any, begin: int) -> list[tuple[int, float, bytes]]:
    """Each token after ``begin`` with its log-prob and all that is before it."""
    ids = np.asarray(ids, np.int32)
    return [(int(ids[i]), float(logprobs[i]), ids[:i].tobytes()) for i in range(int(begin), len(ids))]
