"""Runs of two policies: whose weights sampled each token, what each learns from, publication, resume, refusals."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolltree.engine import Orchestrator, UserError, load_config
from rolltree.engine.app.assembly.run import build
from rolltree.engine.app.console import Console
from rolltree.engine.app.dry_run import plan_lines
from rolltree.engine.data.segment import Origin
from rolltree.engine.data.tree import TokenTree

from ...support.processes import Process, Server
from ...support.real_step import Shared, leaves_of, plain_logprobs
from ...support.resumed import assert_same_run
from ...support.tiny import ROOT, beside, write_job

JUDGES = """
def odd(text, entry):
    return float(len(text) % 2)

def third(text, entry):
    return float(sum(map(ord, text)) % 3 == 0)
"""
STOPS = list("abcdefghijklm")
RUN = f"""
[models.verifier]
path = "{{folder}}/other"
lr = 0.01

[rollout]
program = "generate_then_verify"
program_options = {{{{ generate_tokens = 7, verdicts = 2, question = " = ", stop = {json.dumps(STOPS)} }}}}
n = 8
max_new_tokens = 16
kv_tokens = 4096

[[reward.parts]]
name = "a"
verifier = "judges.py:odd"
role = "generator"

[[reward.parts]]
name = "b"
verifier = "judges.py:third"
role = "verifier"

[algorithm]
objective = "grpo"
advantage = "by_role"
advantage_options = {{{{ rewards = {{{{ generator = "a", verifier = "b" }}}} }}}}

[trainer]
steps = 3
prompts_per_step = 6
lr = 0.02
max_tokens = 4096

[evaluation]
problems = 0

[checkpoint]
every = 1
"""
NAMES = ("", "verifier")


def write_two(directory: Path) -> Path:
    """Two models with different weights, the judges and the configuration; return the TOML's path."""
    path = write_job(directory, {"judges.py": JUDGES})
    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(0.05 * torch.randn(weights.shape, generator=draw))
    model.save_pretrained(directory / "other")
    for file in (directory / "model").glob("tokenizer*"):
        (directory / "other" / file.name).write_bytes(file.read_bytes())
    head = path.read_text().partition("[rollout]")[0]
    path.write_text(head + RUN.format(folder=directory))
    return path


@dataclass
class Update:
    """One optimiser step of a policy, with the weights before it."""

    weights: dict[str, Tensor]
    gradient: dict[str, Tensor]
    loss: float


@dataclass
class Two:
    """A run of two policies: the trees of each step with their credit, and each policy's updates."""

    run: Orchestrator
    trees: list[list[TokenTree]] = field(default_factory=list)
    updates: dict[str, list[Update]] = field(default_factory=lambda: {name: [] for name in NAMES})
    rows: list[dict[str, float]] = field(default_factory=list)

    @property
    def learners(self) -> dict[str, Any]:
        return {"": self.run.learner.first, **self.run.learner.policies}

    def model(self, name: str, step: int) -> Any:
        """Return a policy as it was before ``step`` (from 0 on), with the attention of transformers."""
        config = copy.deepcopy(self.learners[name].model.config)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        model.load_state_dict(self.updates[name][step].weights, strict=False)
        model.tie_weights()
        return model.eval()


def make(toml: Path, directory: Path, *overrides: str) -> Two:
    config = load_config(toml, [f"--output_dir={directory}", *overrides])
    two = Two(build(config, console=Console()))
    rewards = Shared(config.reward.model_dump_json(exclude={"shaping"}), two.run.rewards)
    two.run.rewards, two.run.check_rewards = rewards, str
    update = two.run.learner.update

    def wrapped(trees: list[TokenTree], *rest: Any) -> bool:
        two.trees.append(trees)
        return update(trees, *rest)

    def watched(name: str, learner: Any) -> None:
        optim_step = learner.trainer.optim_step

        def step() -> Any:
            named = dict(learner.model.named_parameters())
            weights = {key: p.detach().clone() for key, p in named.items()}
            gradient = {key: torch.zeros_like(p) if p.grad is None else p.grad.clone() for key, p in named.items()}
            metrics = optim_step()
            two.updates.setdefault(name, []).append(Update(weights, gradient, metrics["actor/loss"][0]))
            return metrics

        learner.trainer.optim_step = step

    two.run.learner.update = wrapped  # type: ignore[method-assign]
    for name, learner in two.learners.items():
        watched(name, learner)
    return two


def take(toml: Path, directory: Path, *overrides: str) -> Two:
    two = make(toml, directory, *overrides)
    two.run.run()
    two.rows = [json.loads(line) for line in two.run.log.path.read_text().splitlines()][1:]
    return two


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_two(tmp_path_factory.mktemp("policies"))


@pytest.fixture(scope="module")
def two(toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Two:
    return take(toml, tmp_path_factory.mktemp("two"))


def sampled(tree: TokenTree, leaf: int, policy: int) -> Any:  # [n] bool
    rows = tree.response_rows(leaf)
    return (tree.origin[rows] == Origin.SAMPLED) & (tree.model[rows] == policy)


@pytest.mark.slow
def test_each_token_has_the_log_prob_of_the_policy_that_sampled_it(two: Two) -> None:
    for step, trees in list(enumerate(two.trees))[1:]:
        models = [two.model(name, step) for name in NAMES]
        tokens, off = [0, 0], [0.0, 0.0]
        for tree, leaf in leaves_of(trees):
            recorded = tree.behaviour_logprob[tree.response_rows(leaf)]
            with torch.no_grad():
                known = [plain_logprobs(model, tree, leaf).numpy() for model in models]
            for policy in (0, 1):
                mine = sampled(tree, leaf, policy)
                assert np.allclose(recorded[mine], known[policy][mine], atol=2e-5)
                tokens[policy] += int(mine.sum())
                off[policy] += float(np.abs(recorded[mine] - known[1 - policy][mine]).sum())
                versions = tree.policy_version[tree.response_rows(leaf)][mine]
                assert (versions == step).all(), "both policies were updated in every step"
            others = ~(sampled(tree, leaf, 0) | sampled(tree, leaf, 1))
            assert np.isnan(recorded[others]).all()
        assert min(tokens) > 30
        assert min(np.array(off) / tokens) > 0.01, "the policies are alike, so nothing was compared"


def test_the_tree_is_a_response_a_question_and_verdicts(two: Two) -> None:
    question = two.run.tokenizer(" = ")["input_ids"]
    asked = 0
    for tree, leaf in leaves_of([tree for trees in two.trees for tree in trees]):
        rows = tree.response_rows(leaf)
        first, second = sampled(tree, leaf, 0), sampled(tree, leaf, 1)
        assert first.any()
        assert (tree.role[rows][second] == 1).all()
        assert (tree.role[rows][first] == 0).all()
        answer = int(first.sum())
        assert first[:answer].all()
        assert answer <= 7
        if len(rows) > answer:
            asked += 1
            end = answer + len(question)
            assert tree.token_id[rows[answer:end]].tolist() == question
            assert second[end:].all()
            assert not tree.loss_mask[rows[answer:end]].any()
            # several verdicts share the response's tokens
            beside = sum(
                len(rows) > answer and tree.response_rows(other)[0] == rows[0] for other in range(tree.num_leaves)
            )
            assert beside == 2
    assert asked > 40


def credit_of(tree: TokenTree, reward: str, policy: int) -> dict[int, float]:
    """Return each leaf's credit: its response's reward among the responses of the role, each counted once."""
    members: dict[tuple[int, ...], list[int]] = {}
    for leaf in range(tree.num_leaves):
        if (mine := sampled(tree, leaf, policy)).any():
            members.setdefault(tuple(tree.response_rows(leaf)[mine].tolist()), []).append(leaf)
    values = [np.mean([tree.rewards[reward][leaf] for leaf in leaves]) for leaves in members.values()]
    mean = sum(values) / len(values)
    spread = (sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)) ** 0.5
    credit = [(value - mean) / (spread + 1e-6) if len(values) > 1 else 0.0 for value in values]
    return {leaf: found for found, leaves in zip(credit, members.values(), strict=True) for leaf in leaves}


def flat_loss(trees: list[TokenTree], model: Any, policy: int, reward: str, *, everything: bool = False) -> Tensor:
    """Return GRPO's on-policy loss of a flat batch: the mean over leaves of the mean over the policy's tokens.

    A group without credit is left out. With ``everything`` tokens of both policies count.
    """
    losses = []
    for tree in trees:
        credit = credit_of(tree, reward, policy)
        if not any(credit.values()):
            continue
        for leaf, value in credit.items():
            logprob = plain_logprobs(model, tree, leaf)
            mine = sampled(tree, leaf, policy)
            if everything:
                mine = mine | sampled(tree, leaf, 1 - policy)
            counted = torch.from_numpy(mine)
            losses.append((-value * (logprob - logprob.detach()).exp())[counted].mean())
    return torch.stack(losses).mean()


def gradient_of(loss: Tensor, model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def off_by(given: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    assert norm > 0
    return float(torch.stack([(given[name] - g).norm() for name, g in expected.items()]).norm() / norm)


@pytest.mark.check(but=1)
@pytest.mark.parametrize(("policy", "reward"), [(0, "a"), (1, "b")])
def test_each_policy_learns_from_its_own_tokens_alone(two: Two, policy: int, reward: str) -> None:
    for step, trees in list(enumerate(two.trees))[1:]:
        model, update = two.model(NAMES[policy], step), two.updates[NAMES[policy]][step]
        loss = flat_loss(trees, model, policy, reward)
        assert abs(update.loss - loss.item()) < 1e-5
        assert off_by(update.gradient, gradient_of(loss, model)) < 2e-4
    with_others = gradient_of(flat_loss(trees, model, policy, reward, everything=True), model)
    assert off_by(update.gradient, with_others) > 0.05, "the other policy's tokens make no difference here"


def test_metrics_have_the_name_of_the_policy(two: Two) -> None:
    for step, row in enumerate(two.rows):
        assert row["actor/loss"] == pytest.approx(two.updates[""][step].loss)
        assert row["verifier/actor/loss"] == pytest.approx(two.updates["verifier"][step].loss)
        assert row["actor/lr"] == pytest.approx(0.02)
        assert row["verifier/actor/lr"] == pytest.approx(0.01)
        tokens = [
            sum(int(((tree.origin == Origin.SAMPLED) & (tree.model == policy)).sum()) for tree in two.trees[step])
            for policy in (0, 1)
        ]
        assert row["rollout/sampled_tokens"] == sum(tokens)
        assert row["verifier/filter/unseen_tokens"] <= tokens[1]


def test_rollouts_and_exports_hold_both(two: Two) -> None:
    directory = two.run.options.directory
    for step, trees in enumerate(two.trees, start=1):
        table = pq.read_table(directory / "rollouts" / f"step_{step:06d}.parquet").to_pylist()
        for row, (tree, leaf) in zip(table, leaves_of(trees), strict=True):
            rows = tree.response_rows(leaf)
            assert row["model"] == tree.model[rows].tolist()
            assert row["role"] == tree.role[rows].tolist()
    for name, learner in two.learners.items():
        exported = AutoModelForCausalLM.from_pretrained(directory / "export" / name)
        for key, weights in learner.model.state_dict().items():
            assert torch.equal(weights, exported.state_dict()[key])
        before = two.updates[name][0].weights
        assert any(not torch.equal(before[key], p) for key, p in learner.model.named_parameters())


@pytest.mark.check(but=1)
@pytest.mark.parametrize(("changed", "same"), [("models.verifier.lr", ""), ("trainer.lr", "verifier")])
def test_a_policy_is_not_moved_by_the_loss_of_the_other(
    two: Two, toml: Path, tmp_path: Path, changed: str, same: str
) -> None:
    """Another learning rate of one policy changes not a bit of the other's first update."""
    found = take(toml, tmp_path, f"--{changed}=0.05", "--trainer.steps=1")
    other = NAMES[same == ""]
    kept = dict(found.learners[same].model.named_parameters())
    assert all(torch.equal(w, two.updates[same][1].weights[key]) for key, w in kept.items())
    moved = dict(found.learners[other].model.named_parameters())
    assert any(not torch.equal(w, two.updates[other][1].weights[key]) for key, w in moved.items())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_any_moment(server: Server, toml: Path, tmp_path: Path) -> None:
    command, moment = ["train", str(toml), f"--output_dir={tmp_path}", "--trainer.steps=8"], random.Random(0)
    log = tmp_path / "tiny" / "metrics.jsonl"
    for number in range(3):
        process = Process(server, [*command, *(["--resume"] if number else [])])
        process.await_row(log, 2 * number + 2)
        time.sleep(moment.uniform(0, 0.3))
        assert not process.ended(), "the run ended before it was killed"
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert Process(server, [*command, "--resume"]).wait() == 0
    assert Process(server, [*command, "--name=whole"]).wait() == 0
    assert_same_run(tmp_path / "tiny", tmp_path / "whole")


@pytest.mark.slow
def test_references_score_their_own_policy(toml: Path, tmp_path: Path) -> None:
    """Each policy's reference is the policy at the start; after an update the columns are of two models."""
    found = take(
        toml, tmp_path, "--roles.reference={}", "--algorithm.objective_options={kl_coef=0.1}", "--trainer.steps=2"
    )
    start = [found.model(name, 0) for name in NAMES]
    for tree, leaf in leaves_of(found.trees[1]):
        scored = tree.ref_logprob[tree.response_rows(leaf)]
        for policy, model in enumerate(start):
            mine = sampled(tree, leaf, policy)
            with torch.no_grad():
                assert np.allclose(scored[mine], plain_logprobs(model, tree, leaf).numpy()[mine], atol=2e-5)


@pytest.mark.slow
def test_a_policy_may_have_an_objective_and_terms_of_its_own(two: Two, toml: Path, tmp_path: Path) -> None:
    """The verifier has RLOO's sum over tokens and learns from its rewarded answers; the first policy changes not a bit.

    Its loss is ``mean_leaves(sum_t -A log p) + 0.1 mean_t(-log p)``, the second mean over tokens of rewarded leaves.
    """
    term = "{name='near',objective='sft',select='rewarded',weight=0.1}"
    found = take(
        toml, tmp_path, "--trainer.steps=2",
        f"--models={{verifier={{path='{toml.parent}/other',lr=0.01,objective='rloo',terms=[{term}]}}}}",
    )  # fmt: skip
    kept = dict(found.learners[""].model.named_parameters())
    first = two.updates[""][1].weights
    assert all(torch.equal(weights, first[key]) for key, weights in found.updates[""][1].weights.items())
    assert kept.keys() == first.keys()
    for step, trees in enumerate(found.trees):
        model, update = found.model("verifier", step), found.updates["verifier"][step]
        sums, near = [], []
        for tree in trees:
            credit, rewarded = credit_of(tree, "b", 1), tree.rewards["reward"] >= 1
            leaves = [leaf for leaf in range(tree.num_leaves) if sampled(tree, leaf, 1).any()]
            trained = any(credit.values())
            for leaf in leaves:
                logprob = plain_logprobs(model, tree, leaf)[torch.from_numpy(sampled(tree, leaf, 1))]
                if trained or any(rewarded[other] for other in leaves):
                    sums.append(-credit[leaf] * logprob.sum())
                if rewarded[leaf]:
                    near.append(-logprob)
        loss = torch.stack(sums).mean() + 0.1 * torch.cat(near).mean()
        assert abs(update.loss - loss.item()) < 1e-4
        assert off_by(update.gradient, gradient_of(loss, model)) < 5e-4
    of_term = [name for name in found.rows[0] if name.startswith(("near/", "verifier/near/"))]
    assert of_term, sorted(found.rows[0])
    assert all(name.startswith("verifier/") for name in of_term)


@pytest.mark.slow
def test_one_policy_may_play_both_roles(two: Two, toml: Path, tmp_path: Path) -> None:
    alone = beside(toml, "alone", models=None)
    config = load_config(alone, [f"--output_dir={tmp_path}", "--trainer.steps=1"])
    run = build(config, console=Console())
    run.run()
    table = pq.read_table(config.run_dir / "rollouts" / "step_000001.parquet").to_pylist()
    assert "model" not in table[0]
    assert any(1 in row["role"] for row in table)
    assert all(mask for row in table for mask, role in zip(row["loss_mask"], row["role"], strict=True) if role == 0)


@pytest.mark.slow
def test_the_example_can_be_planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    planned = "\n".join(plan_lines(load_config(ROOT / "examples" / "two_policies_cpu.toml")))
    assert "1 x outcome (task) + 1 x agrees (verdict)" in planned


REFUSED = {
    "--models={Verifier={}}": "Verifier",
    "--models={verifier={lrr=1.0}}": "there is no key `models.verifier.lrr`",
    "--models={verifier={objective='grppo'}}": "`models.verifier`, as if it were the only policy: .*grppo",
    "--models={verifier={objective='opd'}}": "`models.verifier`, as if .*needs teacher_logprob",
    "--reward.parts=[{name='a',verifier='exact',role='judge'}]": "judges the role 'judge', which rollout.program does "
    "not play; its roles are generator, verifier",
    "--reward.parts=[{name='a',verifier='verdict',options={of='x'}}]": "reads the part 'x', and there is none",
    "--reward.verifier=verdict": "verdict",
    "--rollout.program_options={generate_tokens=7,verdicts=3}": "a multiple of 3 responses, not 8",
    "--rollout.program_options={generate_tokens=7,roles=['one','one']}": "two roles of different names",
}


@pytest.mark.parametrize("flag", REFUSED)
def test_refused_by_name_before_a_run(toml: Path, tmp_path: Path, flag: str) -> None:
    with pytest.raises(UserError, match=REFUSED[flag]):
        list(plan_lines(load_config(toml, [f"--output_dir={tmp_path}", flag])))


def test_another_tokenizer_is_refused(toml: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for file in (toml.parent / "other").iterdir():
        (theirs / file.name).write_bytes(file.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(theirs)
    tokenizer.add_tokens(["[verdict]"])
    tokenizer.save_pretrained(theirs)
    config = load_config(toml, [f"--output_dir={tmp_path}", f"--models.verifier.path={theirs}"])
    with pytest.raises(UserError, match="has another tokenizer than"):
        list(plan_lines(config))


def test_the_dry_run_names_the_policies(toml: Path, tmp_path: Path) -> None:
    lines = list(plan_lines(load_config(toml, [f"--output_dir={tmp_path}"])))
    assert any("verifier plays verifier, with a learning rate of 0.01" in line for line in lines)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
