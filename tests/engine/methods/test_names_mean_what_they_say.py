"""Each name of a configuration does what its paper says: runs through learner and trees against plain formulas."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rolltree.engine import UserError, load_config
from rolltree.engine.app.assembly.learning import inert
from rolltree.engine.app.assembly.policies import resting
from rolltree.engine.app.dry_run import plan_lines

from ...support.real_step import along, check_gradient, leaves_of, plain_logprobs, plain_model, take_steps
from ...support.tiny import GIVEN, REWARD, beside, tiny_job

JUDGES = """
def odd(text, entry):
    return float(sum(map(ord, text)) % 2)


def right(text, entry):
    return 1.0


def by_prompt(text, entry):  # some groups all right, some all wrong, some mixed
    kind = sum(map(ord, entry["question"])) % 3
    return [0.0, 1.0, float(len(text) % 2)][kind]
"""

MINE = """
import numpy as np
from rolltree.engine.methods.credit import Credit
from rolltree.engine.methods.groups import Add

def by_token(trees):
    return Credit("token", [np.sin(tree.token_id + 0.5 * tree.position) for tree in trees])

def even(tree):
    return tree.loss_mask & (tree.token_id % 2 == 0)

def wrong(tree):
    return np.ones(tree.num_tokens + 1)

def gold(tree):
    return Add(["Answer: 3"], [1.0])

"""


toml = tiny_job({"mine.py": MINE, "reward.py": REWARD + JUDGES, "given.jsonl": GIVEN})


def reward(toml: Path, name: str) -> str:
    return f"--reward.verifier={toml.parent}/reward.py:{name}"


class TestGroupsOfEqualRewards:
    """A group leaves an update only where no term has a gradient from it, and normalisers count what is in it."""

    def test_raft_imitates_groups_that_are_all_right(self, toml, tmp_path):
        steps = take_steps(
            toml, tmp_path, reward(toml, "right"), "--algorithm.objective=raft", "--algorithm.select=rewarded"
        )

        def nll(model):
            found = torch.cat([plain_logprobs(model, *leaf) for leaf in leaves_of(steps.trees)])
            return -found.mean()

        check_gradient(steps, nll)

    @pytest.mark.check
    def test_raft_divides_by_what_it_imitates(self, toml, tmp_path):
        steps = take_steps(
            toml, tmp_path, reward(toml, "by_prompt"), "--algorithm.objective=raft", "--algorithm.select=rewarded"
        )
        right = [(tree, leaf) for tree, leaf in leaves_of(steps.trees) if tree.rewards["reward"][leaf] >= 1]
        assert any(np.ptp(tree.rewards["reward"]) == 0 for tree, _ in right)
        check_gradient(steps, lambda model: -torch.cat([plain_logprobs(model, *leaf) for leaf in right]).mean())

    def test_whitened_returns_train_every_group(self, toml, tmp_path):
        steps = take_steps(
            toml, tmp_path, reward(toml, "by_prompt"), "--algorithm.objective=ppo", "--algorithm.advantage=reinforce_pp"
        )
        every = leaves_of(steps.trees)
        returns = np.concatenate(
            [np.full(tree.response_length[leaf], tree.rewards["reward"][leaf], np.float64) for tree, leaf in every]
        )
        whitened = torch.from_numpy((returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)).float()

        def surrogate(model):
            lp = torch.cat([plain_logprobs(model, *leaf) for leaf in every])
            return -(whitened * (lp - lp.detach()).exp()).mean()

        check_gradient(steps, surrogate)

    @pytest.mark.check
    def test_a_kl_reaches_groups_without_credit(self, toml, tmp_path):
        steps = take_steps(
            toml, tmp_path, reward(toml, "right"), "--algorithm.objective=ppo", "--roles.reference={}",
            "--algorithm.objective_options={kl_coef=0.5,entropy_coef=0.01}", "--rollout.temperature=0.7",
        )  # fmt: skip

        def loss(model):
            rows = [plain_logprobs(model, *leaf, 0.7, vocabulary=True) for leaf in leaves_of(steps.trees)]
            entropy = torch.cat([-(row.exp() * row).sum(-1) for row in rows])
            return -0.01 * entropy.mean()  # the policy is its own reference: the KL and its gradient are 0

        check_gradient(steps, loss)

    def test_groups_without_credit_leave_the_normaliser_too(self, toml, tmp_path):
        steps = take_steps(toml, tmp_path, reward(toml, "by_prompt"), "--algorithm.objective=grpo", "--seed=3")
        mixed = [tree for tree in steps.trees if np.ptp(tree.rewards["reward"]) > 0]
        assert 0 < len(mixed) < len(steps.trees)
        assert steps.rows[0]["filter/unseen_groups"] == len(steps.trees) - len(mixed)

        def grpo(model):
            losses = []
            for tree, leaf in leaves_of(mixed):
                rewards = tree.rewards["reward"].astype(np.float64)
                advantage = (rewards[leaf] - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
                lp = plain_logprobs(model, tree, leaf)
                losses.append(-(advantage * (lp - lp.detach()).exp()).mean())
            return torch.stack(losses).mean()

        check_gradient(steps, grpo)

    def test_the_critic_learns_from_every_group(self, toml, tmp_path):
        steps = take_steps(
            toml, tmp_path, reward(toml, "right"), "--algorithm.advantage=gae", "--algorithm.objective=ppo",
            "--roles.critic={lr=1e-3}",
        )  # fmt: skip
        assert steps.rows[0]["critic/vf_loss"] == pytest.approx(0.5)  # its head is 0, every return 1

    def test_the_critic_warms_up_while_the_policy_waits(self, toml, tmp_path):
        steps = take_steps(
            toml, tmp_path, reward(toml, "by_prompt"), "--algorithm.advantage=gae", "--algorithm.objective=ppo",
            "--roles.critic={lr=1e-3}", "--algorithm.weight=0",
        )  # fmt: skip
        assert steps.rows[0]["critic/grad_norm"] > 0
        assert not steps.updates[0].gradient  # the policy took no step

    def test_demonstrations_do_not_count_where_no_term_selects_them(self, toml, tmp_path):
        teach = '--algorithm.terms=[{name="teach",objective="sft",select="injected",weight=0.5}]'
        steps = take_steps(
            toml, tmp_path, reward(toml, "right"), teach, "--algorithm.objective=grpo",
            f"--demonstrations={{path='{toml.parent}/given.jsonl',per_step=4}}",
        )  # fmt: skip
        given = leaves_of(steps.updates[0].given)
        check_gradient(steps, lambda model: -0.5 * torch.cat([plain_logprobs(model, *leaf) for leaf in given]).mean())


class TestPear:
    """Demonstrations are weighed by the policy that wrote them, or refused."""

    TEACH = '--algorithm.terms=[{name="teach",objective="pear",select="injected"}]'

    def test_refuses_demonstrations_without_logprobs(self, toml, tmp_path):
        given = f"--demonstrations={{path='{toml.parent}/given.jsonl',per_step=4}}"
        with pytest.raises(UserError, match=r"'teach' weighs tokens by the log-probs .* demonstrations.logprob_key"):
            take_steps(toml, tmp_path, given, self.TEACH, "--algorithm.weight=0")
        assert not (tmp_path / "runs").exists()

    @pytest.mark.check
    def test_weighs_by_the_ratio_of_the_sequences(self, toml, tmp_path):
        plain = take_steps(
            toml, tmp_path / "a", '--algorithm.terms=[{name="teach",objective="sft",select="injected"}]',
            f"--demonstrations={{path='{toml.parent}/given.jsonl',per_step=6}}", "--algorithm.weight=0",
        )  # fmt: skip
        model = plain_model(plain, plain.updates[0])
        rng = np.random.default_rng(0)
        rows = []
        for line in (toml.parent / "given.jsonl").read_text().splitlines():
            row = json.loads(line)
            of_prompt = [tree for tree in plain.updates[0].given if row["response"] in text(plain, tree)]
            now = plain_logprobs(model, of_prompt[0], 0).detach().numpy()
            shifted = np.minimum(now + rng.normal(scale=0.3, size=len(now)), 0)  # some weights above the cap of 2
            rows.append(row | {"logprobs": shifted.tolist()})
        (tmp_path / "recorded.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = f"--demonstrations={{path='{tmp_path}/recorded.jsonl',per_step=6,logprob_key='logprobs'}}"
        steps = take_steps(toml, tmp_path / "b", given, self.TEACH, "--algorithm.weight=0")
        weights = []

        def pear(model):
            losses = []
            for tree, leaf in leaves_of(steps.updates[0].given):
                lp = plain_logprobs(model, tree, leaf)
                weight = (lp.detach().double() - along(tree, leaf, "behaviour_logprob")).sum().exp().clamp(max=2)
                weights.append(float(weight))
                losses.append(-weight * lp)
            return torch.cat(losses).mean()

        check_gradient(steps, pear)
        assert min(weights) < 0.9
        assert max(weights) == 2

    def test_refuses_other_numbers_of_logprobs(self, toml, tmp_path):
        row = {"prompt": "1 + 2 =", "response": "Answer: 3", "logprobs": [-1.0]}
        (tmp_path / "recorded.jsonl").write_text(json.dumps(row) + "\n")
        given = f"--demonstrations={{path='{tmp_path}/recorded.jsonl',logprob_key='logprobs'}}"
        with pytest.raises(UserError, match=r"needs \d+ log-probs"):
            take_steps(toml, tmp_path, given, self.TEACH, "--algorithm.weight=0")


def text(steps, tree) -> str:
    return steps.orchestrator.tokenizer.decode(tree.token_id)


TREES = (
    "--rollout.program=treepo", "--rollout.program_options={segment_tokens=3,init=2}", "--rollout.n=4",
    "--trainer.updates_per_step=2", "--trainer.lr=0.02", "--algorithm.old_logprob=recompute",
)  # fmt: skip
"""Trees that share tokens, and a second update whose ratios are not 1."""


def by_token(tree) -> np.ndarray:
    """The credit of tokens that `mine.py:by_token` gives."""
    return np.sin(tree.token_id + 0.5 * tree.position)


class TestSequenceRatiosOnTrees:
    """Ratios of sequences with credit or weights that differ within a response: a sum over leaves."""

    OPTIONS = ("--algorithm.objective_options={eps_low=0.02,eps_high=0.03}",)

    def objective(self, steps, weigh, level: str, update: int = 1):
        """The loss of `ppo` on ratios of whole responses, clipped to [0.98, 1.03], mean over responses."""

        def loss(model):
            losses, clipped = [], 0
            for tree, leaf in leaves_of(steps.updates[update].trees):
                lp = plain_logprobs(model, tree, leaf)
                mean = (lp - along(tree, leaf, "proximal_logprob")).mean()
                own = lp - lp.detach() if level == "sequence_token" else mean - mean.detach()
                ratio = (mean.detach() + own).exp().expand(len(lp))
                advantage, weight = weigh(tree, leaf)
                worse = torch.minimum(ratio * advantage, ratio.clamp(0.98, 1.03) * advantage)
                clipped += int((ratio.clamp(0.98, 1.03) != ratio).sum())
                counted = weight != 0
                losses.append(-(worse * weight)[counted].sum() / counted.sum() if counted.any() else None)
            assert clipped
            return torch.stack([one for one in losses if one is not None]).mean()

        return loss

    @pytest.mark.check(but=1)
    @pytest.mark.parametrize(("name", "level"), [("gspo", "sequence"), ("gspo_token", "sequence_token")])
    def test_credit_of_tokens(self, toml, tmp_path, name, level):
        steps = take_steps(
            toml, tmp_path, *TREES, *self.OPTIONS, f"--algorithm.objective={name}",
            f"--algorithm.advantage={toml.parent}/mine.py:by_token",
        )  # fmt: skip
        assert any(tree.num_tokens < tree.logical_tokens for tree in steps.updates[1].trees)

        def weigh(tree, leaf):
            rows = tree.response_rows(leaf)
            return torch.from_numpy(by_token(tree)[rows]).float(), torch.ones(len(rows))

        check_gradient(steps, self.objective(steps, weigh, level), update=1)

    @pytest.mark.check
    def test_gspo_and_gspo_token_differ_on_trees(self, toml, tmp_path):
        made = [
            take_steps(
                toml, tmp_path / name, *TREES, *self.OPTIONS, f"--algorithm.objective={name}",
                f"--algorithm.advantage={toml.parent}/mine.py:by_token",
            )
            for name in ("gspo", "gspo_token")
        ]  # fmt: skip
        one, other = (run.updates[0].gradient["model.norm.weight"] for run in made)
        assert (one - other).norm() > 0.05 * one.norm()

    @pytest.mark.methods
    @pytest.mark.parametrize("name", ["gmpo", "vespo", "off_policy_mask", "luspo"])
    @pytest.mark.parametrize("advantage", ["by_token", "segment_value_diff"])
    def test_others_run_with_finer_credit(self, toml, tmp_path, name, advantage):
        chosen = f"{toml.parent}/mine.py:by_token" if advantage == "by_token" else advantage
        steps = take_steps(
            toml, tmp_path, *TREES, f"--algorithm.objective={name}", f"--algorithm.advantage={chosen}",
            reward(toml, "odd"),
        )  # fmt: skip
        assert all(np.isfinite(update.loss) for update in steps.updates)
        assert all(steps.updates[1].gradient["model.norm.weight"].norm() > 0 for _ in [0])

    @pytest.mark.check
    def test_gmpo_with_credit_of_tokens(self, toml, tmp_path):
        """The geometric mean of ratios clipped on the side that acts, a value for each token's credit."""
        steps = take_steps(
            toml, tmp_path, *TREES, "--algorithm.objective=gmpo",
            f"--algorithm.advantage={toml.parent}/mine.py:by_token",
            "--algorithm.objective_options={eps_low=0.05,eps_high=0.05}",
        )  # fmt: skip

        def gmpo(model):
            losses = []
            for tree, leaf in leaves_of(steps.updates[1].trees):
                lp = plain_logprobs(model, tree, leaf)
                d = lp - along(tree, leaf, "proximal_logprob")
                credit = torch.from_numpy(by_token(tree)[tree.response_rows(leaf)]).float()
                up, down = d.clamp(max=0.05).mean().exp(), d.clamp(min=-0.05).mean().exp()
                losses.append(-torch.where(credit > 0, up * credit, down * credit).mean())
            return torch.stack(losses).mean()

        check_gradient(steps, gmpo, update=1)

    @pytest.mark.check
    def test_a_selection_of_tokens(self, toml, tmp_path):
        """A ratio of the whole response, of which only some tokens are in the loss."""
        steps = take_steps(
            toml, tmp_path, *TREES, *self.OPTIONS, "--algorithm.objective=gspo", reward(toml, "odd"),
            f"--algorithm.select={toml.parent}/mine.py:even", "--algorithm.drop_zero_variance=false",
        )  # fmt: skip

        def loss(model):
            losses = []
            for tree, leaf in leaves_of(steps.updates[1].trees):
                rewards = tree.rewards["reward"].astype(np.float64)
                advantage = (rewards[leaf] - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
                chosen = along(tree, leaf, "token_id") % 2 == 0
                if not chosen.any():
                    continue
                lp = plain_logprobs(model, tree, leaf)[chosen]
                ratio = (lp - along(tree, leaf, "proximal_logprob")[chosen]).mean().exp()
                losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.98, 1.03) * advantage))
            return torch.stack(losses).mean()

        check_gradient(steps, loss, update=1)


@pytest.mark.check
def test_bnpo_means_over_the_tokens_of_each_micro_batch(toml, tmp_path):
    options = [reward(toml, "odd"), "--algorithm.drop_zero_variance=false", "--trainer.max_tokens=150"]
    options += ["--trainer.prompts_per_step=5"]
    steps = take_steps(toml, tmp_path, *options, "--algorithm.objective=bnpo")
    other = take_steps(toml, tmp_path / "ppo", *options, "--algorithm.objective=ppo")
    learner = steps.orchestrator.learner
    batches = learner.batches.packed(steps.trees, [term for term, _ in learner.terms])
    assert len(batches) > 1

    def bnpo(model):
        means = []
        for batch in batches:
            losses = []
            for index, leaves in zip(batch.tree_index, batch.leaf_index, strict=True):
                tree = steps.trees[index]
                rewards = tree.rewards["reward"].astype(np.float64)
                for leaf in leaves:
                    advantage = (rewards[leaf] - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
                    lp = plain_logprobs(model, tree, int(leaf))
                    losses.append(-advantage * (lp - lp.detach()).exp())
            means.append(torch.cat(losses).mean())
        return torch.stack(means).mean()

    check_gradient(steps, bnpo)
    one, two = steps.updates[0].gradient["model.norm.weight"], other.updates[0].gradient["model.norm.weight"]
    assert (one - two).norm() > 1e-3 * one.norm()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--algorithm.objective=gspo", "--algorithm.objective_options={entropy_share=0.5}"], "entropy_share"),
        (["--algorithm.select={mine}:wrong"], "selection of the loss term 'actor'"),
    ],
)
def test_terms_are_computed_on_made_up_trees_before_a_run(toml, tmp_path, options, said):
    options = [option.replace("{mine}", f"{toml.parent}/mine.py") for option in options]
    with pytest.raises(UserError, match=said):
        take_steps(toml, tmp_path, *options)
    assert not (tmp_path / "runs").exists()


def rewards(tree) -> np.ndarray:
    return tree.rewards["reward"].astype(np.float64)


def norm(values, over=None) -> np.ndarray:
    over = values if over is None else over
    return (values - over.mean()) / (over.std(ddof=1) + 1e-6)


OF_PAPERS = {
    "dr_grpo": lambda tree, trees: rewards(tree) - rewards(tree).mean(),
    "rloo": lambda tree, trees: np.array(
        [r - np.delete(rewards(tree), i).mean() for i, r in enumerate(rewards(tree))]
    ),
    "ngrpo": lambda tree, trees: norm(rewards(tree), np.append(rewards(tree), 1.0)),
    "w_reinforce": lambda tree, trees: np.where(rewards(tree) > 0, 1.0, -1.0),
    "nft": lambda tree, trees: (
        np.zeros(tree.num_leaves)
        if np.ptp(rewards(tree)) == 0
        else (2 * rewards(tree) - 1) * np.sqrt((1 - rewards(tree).mean()) / rewards(tree).mean())
    ),
    "gpg": lambda tree, trees: (
        (rewards(tree) - rewards(tree).mean())
        * sum(t.num_leaves for t in trees)
        / max(sum(int((rewards(t) != 0).sum()) for t in trees), 1)
    ),
    "grpo": lambda tree, trees: norm(rewards(tree)),
}  # fmt: skip


@pytest.mark.slow(but=3)
@pytest.mark.check(but=1)
@pytest.mark.parametrize("name", OF_PAPERS)
def test_an_objective_brings_the_credit_of_its_paper(toml, tmp_path, name):
    bare = beside(toml, "bare", algorithm={"advantage": None})
    steps = take_steps(
        bare, tmp_path, f"--algorithm.objective={name}", reward(toml, "odd"), unset=["algorithm.advantage"]
    )
    assert any(np.ptp(rewards(tree)) for tree in steps.trees)
    for tree in steps.trees:
        np.testing.assert_allclose(tree.advantage, OF_PAPERS[name](tree, steps.trees), rtol=1e-5, atol=1e-6)
    if name not in ("dr_grpo", "grpo"):
        assert any(abs(tree.advantage - norm(rewards(tree))).max() > 1e-3 for tree in steps.trees)


@pytest.mark.parametrize(("given", "select"), [("", "rewarded"), (',select="sampled_only"', "sampled_only")])
def test_every_term_brings_the_selection_of_its_paper(toml, given, select):
    term = f'{{name="imitation",objective="raft"{given}}}'
    config = load_config(toml, [f"--algorithm.terms=[{term}]"])
    assert config.algorithm.terms[0].select == select
    assert config.algorithm.select is None


def test_another_credit_is_used_if_it_is_asked_for(toml, tmp_path):
    steps = take_steps(toml, tmp_path, "--algorithm.objective=ngrpo", reward(toml, "by_prompt"))
    for tree in steps.trees:
        np.testing.assert_allclose(tree.advantage, norm(rewards(tree)), rtol=1e-5, atol=1e-6)


def test_all_wrong_groups_of_ngrpo_are_trained(toml, tmp_path):
    steps = take_steps(
        toml, tmp_path, "--algorithm.objective=ngrpo", "--algorithm.advantage=virtual_max", reward(toml, "by_prompt")
    )
    assert any((rewards(tree) == 0).all() for tree in steps.trees)

    def ngrpo(model):
        losses = []
        for tree, leaf in leaves_of([tree for tree in steps.trees if not (rewards(tree) == 1).all()]):
            lp = plain_logprobs(model, tree, leaf)
            advantage = norm(rewards(tree), np.append(rewards(tree), 1.0))[leaf]
            losses.append(-(advantage * (lp - lp.detach()).exp()).mean())
        return torch.stack(losses).mean()

    check_gradient(steps, ngrpo)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--algorithm.objective=cispo"], "starts from the policy that sampled, so every ratio is 1 and its bounds"),
        (["--algorithm.objective=sapo"], "its gate never act"),
        (["--algorithm.objective=gspo"], "bounds of the ratio and ratios of the sequence never act"),
        (["--algorithm.objective=dcpo_clip", "--loop.staleness=1"], "loop.correction = 'truncate' compares"),
        (["--algorithm.objective=dppo_tv", "--loop.staleness=1"], 'or loop.correction to "none"'),
        (["--algorithm.objective=cispo", "--trainer.updates_per_step=2"], None),
        (["--algorithm.objective=cispo", "--trainer.epochs=2"], None),
        (["--algorithm.objective=dppo_tv", "--loop.staleness=1", "--loop.correction=none"], None),
        (["--algorithm.objective=reinforce"], None),
        (["--algorithm.objective=on_policy_pg"], None),
    ],
)
def test_parts_that_never_act_are_named(toml, options, said):
    config = load_config(toml, options)
    found = inert(config)
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_the_first_step_names_what_never_acts(toml, tmp_path):
    steps = take_steps(toml, tmp_path, "--algorithm.objective=cispo", "--trainer.steps=2")
    assert sum("never act" in note for note in steps.notes) == 1
    lines = list(plan_lines(load_config(toml, ["--algorithm.objective=cispo", f"--output_dir={tmp_path}/plan"])))
    assert sum(line.startswith("never acts ") for line in lines) == 1


OWN_SCHEDULES = """
def falls(step, metrics):
    return max(0, 6 - step)

def steered(step, metrics):
    return metrics.get("x", 0.0)

def raises(step, metrics):
    return 1 / (step - 3)
"""


@pytest.mark.check(but=4)
@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("cosine, options {end=4}", "The learning rate is 0 from step 4 on (trainer.lr_scale)"),
        ("cosine, options {end=8}", "The learning rate is 0 from step 8 on"),
        ("cosine, options {end=9}", None),
        ("cosine, options {end=4,last=0.1}", None),
        ("[[0,1.0],[4,0.0]]", "is 0 from step 4 on"),
        ("[[3,0.0],[5,1.0]]", "is 0 at steps 1 to 3"),
        ("[[0,1.0],[2,0.0],[3,1.0],[5,1.0],[6,0.0]]", "is 0 at step 2 and from step 6 on"),
        ("0.5", None),
        ("0.0", "is 0 from step 1 on"),
        ("own.py:falls", "is 0 from step 6 on"),
        ("own.py:steered", None),
        ("own.py:raises", None),
        ("steer, options {metric='actor/entropy',target=1.0,own='schedule/lr_scale',initial=0.0}", None),
    ],
)
def test_steps_whose_learning_rate_is_0_are_named(toml, tmp_path, schedule, said):
    (tmp_path / "own.py").write_text(OWN_SCHEDULES)
    name, _, options = schedule.replace("own.py", f"{tmp_path}/own.py").partition(", options ")
    given = [f"--trainer.lr_scale={name}", *([f"--trainer.lr_scale_options={options}"] if options else [])]
    config = load_config(toml, [*given, "--trainer.steps=8"])
    found = resting(config)
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


def test_each_policy_has_its_own_learning_rate(toml):
    policies = "--models={judge={roles=['b'],lr_scale=[[0,1.0],[2,0.0]]},other={roles=['c']}}"
    config = load_config(toml, [policies, "--trainer.lr_scale=[[0,1.0],[3,0.0]]", "--trainer.steps=4"])
    assert [sentence.partition(", so")[0] for sentence in resting(config)] == [
        "The learning rate is 0 from step 3 on (trainer.lr_scale)",
        "The learning rate of the policy 'judge' is 0 from step 2 on (models.judge.lr_scale)",
        "The learning rate of the policy 'other' is 0 from step 3 on (trainer.lr_scale)",
    ]


@pytest.mark.check
def test_the_plan_and_the_run_say_when_nothing_is_learnt(toml, tmp_path):
    options = ["--trainer.lr_scale=[[0,1.0],[2,0.0]]", "--trainer.steps=2"]
    steps = take_steps(toml, tmp_path, *options)
    assert sum("learning rate is 0 from step 2 on" in note for note in steps.notes) == 1
    lines = list(plan_lines(load_config(toml, [*options, f"--output_dir={tmp_path}/plan"])))
    assert [line for line in lines if line.startswith("learning rate ")] == [
        "learning rate      The learning rate is 0 from step 2 on (trainer.lr_scale), so nothing is learnt there; "
        "change the schedule or trainer.steps."
    ]


def test_responses_that_are_added_end_as_sampled_ones_do(toml, tmp_path):
    teach = '--algorithm.terms=[{name="teach",objective="sft",select="injected"}]'
    steps = take_steps(toml, tmp_path, f"--loop.callback={toml.parent}/mine.py:gold", teach, "--algorithm.weight=0")
    end = steps.orchestrator.tokenizer.eos_token_id
    added = [(tree, leaf) for tree, leaf in leaves_of(steps.trees) if not along(tree, leaf, "loss_mask").any()]
    assert len(added) == len(steps.trees)
    assert all(along(tree, leaf, "token_id")[-1] == end for tree, leaf in added)
    check_gradient(steps, lambda model: -torch.cat([plain_logprobs(model, *leaf) for leaf in added]).mean())
