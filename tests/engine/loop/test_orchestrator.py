"""Whole runs on a tiny model: what is recorded, filtered and refused, and that a killed run resumes exactly."""

import io
import json
import math
import shutil
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console as RichConsole
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.config import load_config
from rolltree.engine.app.console import Console
from rolltree.engine.errors import RunError, UserError
from rolltree.engine.learn import micro_batches
from rolltree.engine.train.trainer import Trainer

RECORDED = [
    "reward/mean", "actor/entropy", "actor/pg_loss", "actor/grad_norm", "actor/pg_clipfrac", "actor/lr",
    "response_length/mean", "response_length/clip_ratio", "perf/throughput", "perf/unique_tokens_per_s",
    "tree/token_ratio", "policy/lag", "training/rollout_probs_diff_mean", "filter/zero_variance_groups",
]  # fmt: skip

VERIFIER = """
def many_vowels(text, entry):
    return float(sum(c in "aeiouAEIOU" for c in text) > 0)

def always(text, entry):
    return 1.0

def fails_on_vowels(text, entry):
    if many_vowels(text, entry):
        raise ZeroDivisionError("vowel")
    return float(len(text) % 2)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A model of random weights that knows letters, prompts, verifiers and a configuration."""
    path = tmp_path_factory.mktemp("home")
    alphabet = [chr(c) for c in range(ord("a"), ord("z") + 1)] + list("0123456789+=")
    tokenizer = Tokenizer(models.BPE(vocab={"<eos>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    wrapped.save_pretrained(path / "model")
    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(wrapped), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.1, eos_token_id=0,
            bos_token_id=None, tie_word_embeddings=True,
        )
    ).save_pretrained(path / "model")  # fmt: skip
    rows = [{"prompt": f"{i}+{j}=", "answer": str(i + j)} for i in range(9) for j in range(9)]
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "verifier.py").write_text(VERIFIER)
    (path / "config.toml").write_text(
        f"""
        name = "run"
        output_dir = "{path}/runs"
        model.path = "{path}/model"
        data = {{ path = "{path}/prompts.jsonl", max_prompt_tokens = 8 }}
        rollout = {{ n = 4, max_new_tokens = 6, kv_tokens = 2048 }}
        reward = {{ verifier = "verifier.py:many_vowels", workers = 1 }}
        trainer = {{ steps = 3, prompts_per_step = 4, lr = 3e-3, max_tokens = 64 }}
        evaluation = {{ problems = 8, every = 2 }}
        checkpoint = {{ every = 2, keep = 2 }}
        """
    )
    return path


def configure(home, tmp_path, *overrides):
    return load_config(home / "config.toml", [f"--output_dir={tmp_path}/runs", *overrides])


def orchestrate(config, resume=False):
    return build(config, console=Console(RichConsole(file=io.StringIO())), resume=resume)


def rows_of(config):
    return [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]


def rollouts_of(config, step):
    return pq.read_table(config.run_dir / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


def untimed(rows):
    return [{k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/"))} for row in rows]


def test_a_whole_run(home, tmp_path):
    config = configure(home, tmp_path, "--rollout.program=treepo", "--rollout.program_options={segment_tokens=2}")
    run = orchestrate(config)
    before = {name: p.detach().clone() for name, p in run.learner.model.named_parameters()}
    summary = run.run()
    rows = rows_of(config)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert ["eval/accuracy" in row for row in rows] == [True, False, True, True]
    assert (summary.accuracy_before, summary.accuracy_after) == (rows[0]["eval/accuracy"], rows[3]["eval/accuracy"])
    assert (summary.steps, summary.problems) == (3, 8)
    for row in rows:
        parts = [v for k, v in row.items() if k.startswith("timing_s/") and k != "timing_s/step"]
        assert math.fsum(parts) == pytest.approx(row["timing_s/step"], rel=1e-9)
        assert min(parts) >= 0
    for row in rows[1:]:
        for name in RECORDED:
            assert math.isfinite(row[name]), name
        assert row["training/rollout_probs_diff_mean"] < 1e-5  # one module samples and trains
        assert row["tree/token_ratio"] > 1
        assert row["policy/lag"] == 0
        assert row["actor/skipped_updates"] == 0

    for step in (1, 2, 3):
        leaves = rollouts_of(config, step)
        assert len(leaves) == 16
        assert np.mean([leaf["reward"] for leaf in leaves]) == pytest.approx(rows[step]["reward/mean"])
        assert np.mean([len(leaf["response_ids"]) for leaf in leaves]) == rows[step]["response_length/mean"]
        assert {v for leaf in leaves for v in leaf["policy_version"]} == {step - 1}
        groups = {leaf["prompt_id"]: [x for x in leaves if x["prompt_id"] == leaf["prompt_id"]] for leaf in leaves}
        assert len(groups) == 4
        for group in groups.values():
            reward = np.array([leaf["reward"] for leaf in group])
            expected = (reward - reward.mean()) / (reward.std(ddof=1) + 1e-6)
            np.testing.assert_allclose([leaf["advantage"] for leaf in group], expected, atol=1e-5)
            assert all("<eos>" not in leaf["response_text"] for leaf in group)

    checkpoints = sorted(p.name for p in (config.run_dir / "checkpoints").iterdir())
    assert checkpoints == ["step_000002", "step_000003"]
    assert load_config(config.run_dir / "config.toml") == config

    exported = AutoModelForCausalLM.from_pretrained(summary.export)  # plain transformers
    assert exported.config._attn_implementation != "rolltree"
    assert "rolltree" not in (summary.export / "config.json").read_text()
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, dict(run.learner.model.named_parameters())[name])
        assert not torch.equal(parameter, before[name])
    prompt = AutoTokenizer.from_pretrained(summary.export)("3+4=", return_tensors="pt")
    assert exported.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] > 4
    assert not list(config.run_dir.glob("*.tmp"))


def test_nothing_is_overwritten(home, tmp_path):
    config = configure(home, tmp_path, "--trainer.steps=1", "--evaluation.problems=0", "--evaluation.every=0")
    with pytest.raises(UserError, match=r"nothing to resume.*start without --resume"):
        orchestrate(config, resume=True)
    assert not config.run_dir.exists()
    summary = orchestrate(config).run()
    assert summary.accuracy_before is None
    assert summary.accuracy_after is None
    before = {p: p.read_bytes() for p in config.run_dir.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=r"already holds a run; continue it with --resume"):
        orchestrate(config)
    with pytest.raises(UserError, match=r"`trainer.lr` is 0.5 but .* trained with 0.003"):
        orchestrate(
            configure(home, tmp_path, "--trainer.lr=0.5", "--evaluation.problems=0", "--evaluation.every=0"), True
        )
    assert {p: p.read_bytes() for p in config.run_dir.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--model.path=/nowhere/model", "/nowhere/model"),
        ("--algorithm.advantage=group_nrom", "group_norm"),
        ("--algorithm.objective=grppo", "grpo"),
        ("--rollout.program=flatt", "flat"),
        ("--reward.verifier=/nowhere/verifier.py:score", "/nowhere/verifier.py"),
        ("--trainer.updates_per_step=2 --rollout.top_k=5", "top_k"),
        ("--algorithm.objective_options={kl_coef=0.1}", "needs ref_logprob"),
        ("--evaluation.problems=2 --data.eval_path={home}/one.jsonl", "only 1 different problems"),
    ],
)
def test_an_early_mistake_leaves_nothing_behind(home, tmp_path, override, message):
    (home / "one.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    config = configure(home, tmp_path, *override.replace("{home}", str(home)).split())
    with pytest.raises(UserError, match=message):
        orchestrate(config).run()
    assert not config.run_dir.exists()


def test_two_processes_never_write_one_run(home, tmp_path):
    config = configure(home, tmp_path, "--trainer.steps=1", "--evaluation.problems=0", "--evaluation.every=0")
    orchestrate(config).run()
    before = {p: p.read_bytes() for p in config.run_dir.rglob("*") if p.is_file()}
    holder = f"import fcntl, time; f = open({str(config.run_dir / '.lock')!r}); fcntl.flock(f, fcntl.LOCK_EX); "
    with subprocess.Popen([sys.executable, "-c", holder + "print(flush=True); time.sleep(60)"], stdout=-1) as process:
        process.stdout.readline()
        with pytest.raises(UserError, match="Another process is writing"):
            orchestrate(config, resume=True).run()
        process.kill()
    assert {p: p.read_bytes() for p in config.run_dir.rglob("*") if p.is_file()} == before


@pytest.mark.check(but=1)
@pytest.mark.parametrize("on_failure", ["drop", "zero", "raise"])
def test_failing_verifiers_are_counted_and_treated_as_asked(home, tmp_path, on_failure):
    config = configure(
        home, tmp_path, "--trainer.steps=1", "--reward.verifier", f"{home}/verifier.py:fails_on_vowels",
        f"--reward.on_failure={on_failure}", "--evaluation.problems=0", "--evaluation.every=0",
        "--algorithm.advantage=group_mean",
    )  # fmt: skip
    run = orchestrate(config)
    if on_failure == "raise":
        with pytest.raises(RunError, match=r"verifier failed on a response to .*vowel.*on_failure"):
            run.run()
        return
    run.run()
    (_, row), leaves = rows_of(config), rollouts_of(config, 1)
    failed = [any(c in "aeiou" for c in leaf["response_text"]) for leaf in leaves]
    assert 0 < sum(failed) < len(leaves)
    assert row["reward/failed_raised"] == sum(failed)
    groups = {leaf["prompt_id"]: [] for leaf in leaves}
    for leaf, bad in zip(leaves, failed, strict=True):
        groups[leaf["prompt_id"]].append((leaf, bad))
        if bad and on_failure == "drop":
            assert (leaf["status"], leaf["reward"], leaf["advantage"]) == ("failed", None, 0.0)
        elif bad:
            assert leaf["status"] != "failed"
            assert leaf["reward"] == 0
    for group in groups.values():  # a dropped response is in no statistic of its group
        counted = [leaf for leaf, bad in group if not (bad and on_failure == "drop")]
        if len(counted) > 1:
            mean = np.mean([leaf["reward"] for leaf in counted])
            for leaf in counted:
                assert leaf["advantage"] == pytest.approx(leaf["reward"] - mean, abs=1e-6)


@pytest.mark.check(but=1)
@pytest.mark.parametrize("drop", ["true", "false"])
def test_groups_of_equal_rewards_teach_nothing(home, tmp_path, drop):
    config = configure(
        home, tmp_path, "--trainer.steps=1", "--reward.verifier", f"{home}/verifier.py:always",
        f"--algorithm.drop_zero_variance={drop}", "--evaluation.problems=0", "--evaluation.every=0",
    )  # fmt: skip
    run = orchestrate(config)
    before = [p.detach().clone() for p in run.learner.model.parameters()]
    run.run()
    row = rows_of(config)[1]
    assert row["filter/zero_variance_groups"] == 4
    assert row["reward/mean"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, run.learner.model.parameters(), strict=True))
    if drop == "true":
        assert row["actor/empty_updates"] == 1
        assert run.learner.trainer.updates == 0
    else:
        assert row["actor/grad_norm"] == 0


@pytest.mark.check(but=1)
@pytest.mark.parametrize("dapo", [False, True], ids=["sequence mean", "token mean"])
def test_several_updates_split_the_trees_and_compare_with_the_sampler(home, tmp_path, monkeypatch, dapo):
    config = configure(
        home,
        tmp_path,
        f"--algorithm.objective={'dapo' if dapo else 'grpo'}",
        "--trainer.steps=1",
        "--trainer.updates_per_step=2",
        "--algorithm.drop_zero_variance=false",
        "--evaluation.problems=0",
        "--evaluation.every=0",
    )
    calls = []
    forward_backward = Trainer.forward_backward

    def spy(self, batch, terms, tokens, *, on_policy, **rest):
        calls.append((batch.num_leaves, terms[0].normalizer, batch.loss_tokens, on_policy))  # one batch an update
        return forward_backward(self, batch, terms, tokens, on_policy=on_policy, **rest)

    monkeypatch.setattr(Trainer, "forward_backward", spy)
    run = orchestrate(config)
    run.run()
    assert [leaves for leaves, *_ in calls] == [8, 8]
    assert [on_policy for *_, on_policy in calls] == [True, False]
    if dapo:
        assert all(normalizer == tokens != leaves for leaves, normalizer, tokens, _ in calls)
    else:
        assert all(normalizer == leaves for leaves, normalizer, *_ in calls)
    row = rows_of(config)[1]
    assert run.learner.trainer.updates == 2
    assert 0 < row["policy/lag"] < 1  # 0 in the first update, 1 in the second
    assert row["actor/ppo_kl"] != 0


@pytest.mark.slow
def test_a_model_that_trees_do_not_fit_trains_flat(home, tmp_path, monkeypatch):
    """The warning names the difference; updates of padded sequences learn what the tree's would have taught."""
    weights = []
    for name, error, says in (("fits", 1e-7, False), ("not", 0.25, True), ("unasked", 0.25, False)):
        monkeypatch.setattr(micro_batches, "tree_error", lambda model, trees, error=error: error)
        check = str(name != "unasked").lower()
        config = configure(home, tmp_path, f"--name={name}", "--trainer.steps=1", f"--trainer.self_check={check}")
        screen = io.StringIO()
        run = build(config, console=Console(RichConsole(file=screen, width=500)))
        run.run()
        assert ("mean difference 0.25" in screen.getvalue()) == says
        assert run.learner.batches.flat == says
        weights.append([p.detach().clone() for p in run.learner.model.parameters()])
    for tree, flat, unasked in zip(*weights, strict=True):
        torch.testing.assert_close(tree, flat, rtol=1e-4, atol=1e-5)
        assert torch.equal(tree, unasked)


@pytest.mark.check
def test_everything_random_follows_from_the_seed(home, tmp_path):
    """Two runs are equal digit for digit, another seed's is not."""
    plain = ["--trainer.steps=2", "--evaluation.problems=0", "--evaluation.every=0"]
    runs = []
    for name, extra in (("a", []), ("b", []), ("c", ["--seed=1"])):
        config = configure(home, tmp_path, f"--name={name}", *plain, *extra)
        orchestrate(config).run()
        runs.append((untimed(rows_of(config)), [leaf["response_ids"] for leaf in rollouts_of(config, 1)]))
    assert runs[0] == runs[1]
    assert runs[0][1] != runs[2][1]


@pytest.mark.slow
def test_more_steps_after_the_end(home, tmp_path):
    """A finished run goes on under --resume with more steps, and equals one that was longer from the start."""
    overrides = ["--evaluation.problems=0", "--evaluation.every=0"]
    orchestrate(configure(home, tmp_path, "--trainer.steps=2", *overrides)).run()
    longer = configure(home, tmp_path, "--trainer.steps=4", *overrides)
    assert orchestrate(longer, resume=True).run().steps == 4
    whole = configure(home, tmp_path, "--trainer.steps=4", "--name=whole", *overrides)
    orchestrate(whole).run()
    assert untimed(rows_of(longer)) == untimed(rows_of(whole))


@pytest.mark.check
def test_rows_after_the_checkpoint_are_set_aside(home, tmp_path):
    """The rows after the checkpoint are set aside, not thrown away."""
    config = configure(home, tmp_path)
    orchestrate(config).run()
    log = config.run_dir / "metrics.jsonl"
    whole = log.read_text().splitlines(keepends=True)
    log.write_text("".join(whole) + '{"step": 4, "rew')
    orchestrate(config, resume=True).run()
    assert untimed(rows_of(config)) == untimed(map(json.loads, whole))
    (aside,) = config.run_dir.glob("metrics.before-resume-*.jsonl")
    assert aside.read_text().endswith('{"step": 4, "rew')


# -- kill -9 -----------------------------------------------------------------------------------------------------------

PROCESS = """
import sys
import torch
torch.set_num_threads(1)
from rolltree.engine.app.cli import main
sys.exit(main(sys.argv[1:]))
"""


SLOW_DISK = """
import os, time
fsync = os.fsync
os.fsync = lambda file: (time.sleep(0.2), fsync(file))
"""


def start(home, tmp_path, name, *extra, before=""):
    command = [sys.executable, "-c", before + PROCESS, "train", str(home / "config.toml")]
    command += [f"--output_dir={tmp_path}/runs", f"--name={name}", *KILLED, *extra]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


KILLED = ("--trainer.steps=6", "--trainer.prompts_per_step=8", "--rollout.program=treepo")


@pytest.fixture(scope="module")
def whole(home, tmp_path_factory):
    """The directory of a run that nobody killed."""
    path = tmp_path_factory.mktemp("whole")
    process = start(home, path, "whole")
    assert process.wait(1200) == 0, process.stderr.read()
    return path / "runs" / "whole"


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["the first one", "a later one"])
def test_killed_while_a_checkpoint_is_written(home, whole, tmp_path, first):
    """All earlier checkpoints are whole; without any, the same command begins anew in the same place."""
    directory = tmp_path / "runs" / "killed"
    checkpoints, caught = directory / "checkpoints", False
    for _ in range(3):  # the moment may be missed
        shutil.rmtree(directory, ignore_errors=True)
        process = start(home, tmp_path, "killed", before=SLOW_DISK)
        while process.poll() is None:
            time.sleep(0.005)
            done = [p for p in checkpoints.glob("step_*") if not p.suffix]
            if len(done) == (0 if first else 1) and any(checkpoints.glob("step_*.tmp")):
                process.kill()
        process.wait()
        done = [p for p in checkpoints.glob("step_*") if not p.suffix]
        if caught := any(checkpoints.glob("step_*.tmp")) and len(done) == (0 if first else 1):
            break
    assert caught, "no run was killed while it wrote; the test shows nothing"
    again = start(home, tmp_path, "killed", *([] if first else ["--resume"]))
    assert again.wait(1200) == 0, again.stderr.read()
    assert not any(checkpoints.glob("*.tmp"))
    rows = [[json.loads(line) for line in (d / "metrics.jsonl").read_text().splitlines()] for d in (directory, whole)]
    assert untimed(rows[0]) == untimed(rows[1])
