"""The replay store in real runs: what it draws, the gradient by a formula, resumption, groups of other runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rolltree.engine import TokenTree, UserError, load_config
from rolltree.engine.data.store import read_rollouts, write_rollouts
from rolltree.engine.loop import replay_store
from rolltree.engine.loop.replay import read_groups, write_groups
from rolltree.engine.loop.replay_store import ReplayStore, Stored
from rolltree.engine.record.rollout_files import write_part

from ...support.real_step import Steps, along, check_gradient, leaves_of, plain_logprobs, plain_model, take_steps
from ...support.tiny import tiny_job

MINE = """
def odd(text, entry):
    return float(sum(map(ord, text)) % 2)


def needs_entry(tree, entry):
    return tree.rewards["reward"]


def no_entry(tree):
    return tree.rewards["reward"]
"""
STEPS = (
    "--trainer.self_check=false", "--trainer.prompts_per_step=4", "--trainer.lr=0.02", "--trainer.max_tokens=4096",
    "--algorithm.objective=ppo", "--algorithm.advantage=group_norm", "--replay.share=0.5",
)  # fmt: skip
EVERYTHING = ("rollout.program", "rollout.program_options", "algorithm.advantage")


toml = tiny_job({"mine.py": MINE}, reward={"verifier": "mine.py:odd"})


def steps_of(toml: Path, directory: Path, *flags: str, **given) -> Steps:
    return take_steps(toml, directory, *STEPS, *flags, unset=EVERYTHING, **given)


@pytest.fixture(scope="module")
def whole(toml, tmp_path_factory) -> Steps:
    """Three steps of two new groups and two of the store, whose credit counts half and whose rewards are shaped."""
    shaping = "--reward.shaping=[{name='overlong'}]"
    return steps_of(toml, tmp_path_factory.mktemp("whole"), "--trainer.steps=3", "--replay.weight=0.5", shaping)


def shaped(tree) -> np.ndarray:
    length = np.array([len(tree.response_rows(leaf)) for leaf in range(tree.num_leaves)])
    return tree.rewards["verifier"] - np.clip((length - 8) / 2, 0, 1)


def test_replayed_groups_are_as_they_were_sampled(whole):
    first, *later = whole.updates
    assert len(first.trees) == 2
    known = {int(tree.group[0]): tree for tree in first.trees}
    seen = 0
    for step, update in enumerate(later, start=1):
        again = [tree for tree in update.trees if "replayed" in tree.meta]
        assert len(again) == 2
        assert len(update.trees) == 4
        for tree in again:
            before = known[int(tree.group[0])]
            np.testing.assert_array_equal(tree.token_id, before.token_id)
            np.testing.assert_array_equal(tree.behaviour_logprob, before.behaviour_logprob)
            np.testing.assert_array_equal(tree.policy_version, before.policy_version)
            np.testing.assert_array_equal(tree.rewards["verifier"], before.rewards["verifier"])
            assert tree.policy_version[tree.loss_mask].max() < step
            assert tree.meta["entry"] == before.meta["entry"]
            seen += 1
        known |= {int(tree.group[0]): tree for tree in update.trees if "replayed" not in tree.meta}
    assert seen == 4
    assert [row["replay/groups"] for row in whole.rows] == [0, 2, 2]
    assert whole.rows[1]["replay/lag"] == 1


@pytest.mark.parametrize("update", [1, 2])
def test_the_gradient_is_that_of_new_and_old_groups(whole, update):
    """Clipped ratios against the policy that sampled each token; the store's credit counts half, shaped once."""
    trees = whole.updates[update].trees
    ratios = []

    def loss_of(model):
        loss = torch.zeros(())
        live = [t for t in trees if np.ptp(shaped(t)) > 0]
        for tree in live:
            R = shaped(tree)
            np.testing.assert_allclose(tree.rewards["reward"], R, rtol=1e-5)
            advantage = (R - R.mean()) / (R.std(ddof=1) + 1e-6) * (0.5 if "replayed" in tree.meta else 1.0)
            for leaf in range(tree.num_leaves):
                lp, A = plain_logprobs(model, tree, leaf), float(advantage[leaf])
                r = (lp - along(tree, leaf, "behaviour_logprob")).exp()
                ratios.append(r.detach())
                loss = loss - torch.minimum(r * A, r.clamp(0.8, 1.2) * A).sum()
        return loss / sum(len(t.response_rows(leaf)) for t, leaf in leaves_of(live))

    check_gradient(whole, loss_of, update)
    r = torch.cat(ratios)
    assert ((r < 0.8) | (r > 1.2)).sum() > 3, "no ratio is clipped, so that replay is not told from new groups"


@pytest.mark.check
def test_groups_of_another_run(toml, whole, tmp_path):
    """Rollouts as parquet and groups of a store train a new run from its first step on, as another policy's."""
    other = whole.orchestrator.options.directory
    recorded = sorted((other / "replay").glob("*.safetensors"))
    assert len(recorded) == 6
    for path in (other / "rollouts" / "step_000001.parquet", recorded[0]):
        steps = steps_of(toml, tmp_path / path.stem, f"--replay.paths=['{path}']")
        again = [tree for tree in steps.updates[0].trees if "replayed" in tree.meta]
        assert len(again) == (2 if path.suffix == ".parquet" else 1)
        before = {tree.meta["prompt_id"]: tree for tree in whole.updates[0].trees}
        for tree in again:
            mine = before[tree.meta["prompt_id"]]
            assert sorted(map(tuple, responses(tree))) == sorted(map(tuple, responses(mine)))
            assert (tree.policy_version[tree.loss_mask] == -1).all()


@pytest.mark.check
def test_rollouts_of_several_ranks_are_a_folder(toml, whole, tmp_path):
    """A group is in each part; the folder is another file when one of them has changed."""
    folder, groups = tmp_path / "step_000001.parquet", whole.updates[0].trees[:2]
    folder.mkdir()
    for part in range(2):
        write_part(folder, 1, groups, [[""] * tree.num_leaves for tree in groups], part, 2)
    before = replay_store._digest(folder)
    steps = steps_of(toml, tmp_path / "run", f"--replay.paths=['{folder}']")
    again = [tree.meta["prompt_id"] for tree in steps.updates[0].trees if "replayed" in tree.meta]
    assert sorted(again) == sorted(tree.meta["prompt_id"] for tree in groups)
    (folder / "part_000001.parquet").write_bytes((folder / "part_000000.parquet").read_bytes())
    assert replay_store._digest(folder) != before


def copied(whole, tmp_path) -> Path:
    """Return a copy of a file of the rollouts of ``whole``."""
    path = tmp_path / "other.parquet"
    path.write_bytes((whole.orchestrator.options.directory / "rollouts" / "step_000001.parquet").read_bytes())
    return path


@pytest.mark.slow
def test_a_file_of_another_run_is_read_once_and_a_resumed_run_wants_the_same(toml, whole, tmp_path, monkeypatch):
    path = copied(whole, tmp_path)
    opened = []
    monkeypatch.setattr(replay_store, "read_rollouts", lambda file: opened.append(file) or read_rollouts(file))
    flags = (f"--replay.paths=['{path}']", "--replay.keep=solved", "--reward.shaping=[{name='overlong'}]")
    straight = steps_of(toml, tmp_path / "straight", "--trainer.steps=3", *flags)
    assert opened == [path]
    drawn = [[tree for tree in update.trees if "replayed" in tree.meta] for update in straight.updates]
    foreign = [tree for some in drawn for tree in some if "entry" not in tree.meta]
    ids = [tree.meta["prompt_id"] for tree in foreign]
    assert len(set(ids)) < len(ids), "no group was drawn twice, so the store's own is not compared"
    fresh = {tree.meta["prompt_id"]: tree for tree in read_rollouts(path)}
    for tree in foreign:
        np.testing.assert_array_equal(tree.rewards["verifier"], fresh[tree.meta["prompt_id"]].rewards["reward"])
    steps_of(toml, tmp_path / "cut", "--trainer.steps=2", *flags)
    last = steps_of(toml, tmp_path / "cut", "--trainer.steps=3", *flags, resume=True).updates[0]
    for name, gradient in straight.updates[2].gradient.items():
        assert torch.equal(last.gradient[name], gradient), name
    path.write_bytes((whole.orchestrator.options.directory / "rollouts" / "step_000002.parquet").read_bytes())
    with pytest.raises(UserError, match=r"other.parquet' \(replay.paths\) has changed"):
        steps_of(toml, tmp_path / "cut", "--trainer.steps=4", *flags, resume=True)


@pytest.mark.check
def test_a_part_that_asks_for_an_entry_which_a_parquet_file_lacks(toml, whole, tmp_path):
    """It ends the run with a sentence; a part that does not ask, and groups with their entry, are trained on."""
    path = copied(whole, tmp_path)
    recorded = sorted((whole.orchestrator.options.directory / "replay").glob("*.safetensors"))[0]
    asks, other = (
        f"--reward.shaping=[{{name='{toml.parent}/mine.py:{name}'}}]" for name in ("needs_entry", "no_entry")
    )
    with pytest.raises(UserError, match=r"asks for 'entry', which groups in parquet files of `replay.paths`"):
        steps_of(toml, tmp_path / "a", f"--replay.paths=['{path}']", asks)
    for name, file, flag in (("b", path, other), ("c", recorded, asks)):
        (update,) = steps_of(toml, tmp_path / name, f"--replay.paths=['{file}']", flag).updates
        assert any("replayed" in tree.meta for tree in update.trees)


def test_a_recorded_group_of_several_requests_is_one_tree(whole, tmp_path):
    recorded = sorted((whole.orchestrator.options.directory / "replay").glob("*.safetensors"))
    ((prompt, (first,)),) = read_groups(recorded[0])
    write_groups(tmp_path / "two.safetensors", [(prompt, [first, first])])
    ((_, tree),) = replay_store._groups(tmp_path / "two.safetensors")
    assert tree.num_leaves == 2 * first.tree.num_leaves


def test_draws_follow_credit_and_their_number_the_store(toml, tmp_path, monkeypatch):
    config = load_config(toml, [*STEPS, "--replay.prefer=2"])
    store = ReplayStore(config.replay, tmp_path, 0, bool, None, count=1)
    scores = (0.0, 1.0, 2.0)
    store.stored = [Stored(f"{score}", 0, 1, score, "") for score in scores]
    monkeypatch.setattr(store, "_read", lambda one: one.score)
    drawn = [score for step in range(2000) for score in store.draw(step)]
    share = [drawn.count(score) / 2000 for score in scores]
    np.testing.assert_allclose(share, [0, 0.2, 0.8], atol=0.03)
    monkeypatch.setattr(store, "_count", 9)
    assert sorted(store.draw(1)) == list(scores)


def test_a_file_is_deleted_when_two_checkpoints_do_not_name_it(toml, tmp_path):
    config = load_config(toml, [*STEPS, "--replay.groups=1"])
    store = ReplayStore(config.replay, tmp_path, 0, bool, None, count=1)
    for number in range(3):
        (tmp_path / f"{number}").touch()
        store.stored.append(Stored(f"{number}", 0, number + 1, 1.0, ""))
    store.state_dict()
    store.add([], [], 4)  # the two oldest leave
    left = [sorted(path.name for path in tmp_path.iterdir())]
    for _ in range(2):
        assert [one["file"] for one in store.state_dict()["stored"]] == ["2"]
        left.append(sorted(path.name for path in tmp_path.iterdir()))
    assert left == [["0", "1", "2"], ["0", "1", "2"], ["2"]]


def test_groups_that_are_kept_and_judged_enter_the_store(toml, whole, tmp_path):
    files = sorted((whole.orchestrator.options.directory / "replay").glob("*.safetensors"))[:3]
    recorded = [read_groups(path)[0] for path in files]
    trees = [parts[0].tree for _, parts in recorded]
    trees[2].rewards["reward"][0] = np.nan
    store = ReplayStore(load_config(toml, STEPS).replay, tmp_path, 0, lambda tree: tree is not trees[0], None, count=1)
    store.add(recorded, trees, 1)
    assert [one.file for one in store.stored] == [files[1].name]
    assert [path.name for path in tmp_path.iterdir()] == [files[1].name]


def test_responses_of_one_group_under_different_prompts_are_refused(tmp_path):
    tree = TokenTree.from_sequences([1, 2], [[3, 4], [5]])
    tree.meta |= {"prompt_id": "a", "task": "t", "prompt_text": "p"}
    tree.rewards["reward"] = np.zeros(2, np.float32)
    tree.leaf_prompt[1] = 3
    write_rollouts(tmp_path / "a.parquet", 1, [tree], [["x", "y"]])
    with pytest.raises(UserError, match="responses to 'a' under different prompts"):
        read_rollouts(tmp_path / "a.parquet")


@pytest.mark.check
def test_a_lost_or_changed_file_of_the_store_ends_the_run(toml, tmp_path):
    steps_of(toml, tmp_path, "--trainer.steps=1")
    files = sorted((tmp_path / "runs" / "tiny" / "replay").glob("*.safetensors"))
    assert len(files) == 2
    content = files[0].read_bytes()
    files[0].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=f"{files[0].name}' of the replay store has changed"):
        steps_of(toml, tmp_path, "--trainer.steps=2", resume=True)
    files[0].unlink()
    with pytest.raises(UserError, match=f"{files[0].name}' of the replay store is missing"):
        steps_of(toml, tmp_path, "--trainer.steps=2", resume=True)


def responses(tree):
    return [tree.token_id[tree.response_rows(leaf)].tolist() for leaf in range(tree.num_leaves)]


def test_rollouts_are_read_as_they_were_written(whole):
    files = sorted((whole.orchestrator.options.directory / "rollouts").glob("*.parquet"))
    read = [tree for path in files for tree in read_rollouts(path)]
    assert len(read) == len(whole.judged) - 4  # without those of the store
    written = [tree for tree in whole.judged if "replayed" not in tree.meta]
    for ours, theirs in zip(read, written, strict=True):
        assert responses(ours) == responses(theirs)
        for leaf in range(ours.num_leaves):
            for name in ("behaviour_logprob", "policy_version", "loss_mask", "origin", "temperature"):
                mine, other = (getattr(t, name)[t.response_rows(leaf)] for t in (ours, theirs))
                np.testing.assert_array_equal(mine, other)
        np.testing.assert_array_equal(ours.rewards["reward"], theirs.rewards["verifier"])
        np.testing.assert_array_equal(ours.token_id[: ours.prompt_length], theirs.token_id[: theirs.prompt_length])


def test_old_groups_leave_and_their_files_after_two_checkpoints(toml, tmp_path):
    steps = steps_of(toml, tmp_path, "--trainer.steps=4", "--replay.age=1", "--replay.groups=3")
    store = steps.orchestrator.store
    assert {one.step for one in store.stored} == {4}
    files = {path.name for path in store.directory.glob("*.safetensors")}
    state = json.loads(json.dumps(store.state_dict()))
    assert {one["file"] for one in state["stored"]} <= files
    assert len(files) < 8
    for update in steps.updates[1:]:
        again = [tree for tree in update.trees if "replayed" in tree.meta]
        assert again
        assert len(read_groups(store.directory / store.stored[0].file)) == 1


def test_what_cannot_be_used_is_refused(toml, whole, tmp_path):
    with pytest.raises(UserError, match="There is no file"):
        steps_of(toml, tmp_path / "a", f"--replay.paths=['{tmp_path}/none.parquet']")
    path = whole.orchestrator.options.directory / "rollouts" / "step_000001.parquet"
    with pytest.raises(UserError, match=r"hold 2 groups, and the store takes replay.groups = 1"):
        steps_of(toml, tmp_path / "c", f"--replay.paths=['{path}']", "--replay.groups=1")
    with pytest.raises(UserError, match="did you mean 'solved'"):
        steps_of(toml, tmp_path / "b", "--replay.keep=solve")


@pytest.mark.check
@pytest.mark.parametrize("update", [4, 5])
def test_replay_and_schedules_one_step_behind(late, update):
    """Staleness 1: clipped ratios to the policy before the step, weights min(exp(that - the sampler's), 2), and bounds
    that widen with the step, for new groups and those of the store alike."""
    trees = late.updates[update].trees
    before = plain_model(late, late.updates[4])
    seen = {"weighed": 0, "capped": 0, "clipped": 0}

    def loss_of(model):
        loss, count = torch.zeros(()), 0
        for tree, leaf in leaves_of([t for t in trees if np.ptp(t.rewards["reward"]) > 0]):
            R = tree.rewards["reward"].astype(np.float64)
            A = float(((R - R.mean()) / (R.std(ddof=1) + 1e-6))[leaf])
            lp = plain_logprobs(model, tree, leaf)
            with torch.no_grad():
                proximal = plain_logprobs(before, tree, leaf)
            w = (proximal - along(tree, leaf, "behaviour_logprob")).exp()
            r = (lp - proximal).exp()
            seen["weighed"] += int(((w - 1).abs() > 0.02).sum())
            seen["capped"] += int((w > 2).sum())
            seen["clipped"] += int(((r < 0.8) | (r > 1.3)).sum())
            loss = loss - (w.clamp(max=2) * torch.minimum(r * A, r.clamp(0.8, 1.3) * A)).sum()
            count += len(lp)
        return loss / count

    assert any("replayed" in tree.meta for tree in trees)
    check_gradient(late, loss_of, update, tolerance=5e-3)
    assert seen["weighed"] > 10
    if update == 5:
        assert seen["clipped"] > 3


@pytest.fixture(scope="module")
def late(toml, tmp_path_factory) -> Steps:
    """Three steps of two updates at staleness 1; the upper bound is 1 + step / 10."""
    steps = steps_of(
        toml, tmp_path_factory.mktemp("late"), "--trainer.steps=3", "--loop.staleness=1",
        "--trainer.updates_per_step=2",
        "--algorithm.objective_options={eps_high={schedule=[[1,0.1],[3,0.3]]}}", "--trainer.prompts_per_step=8",
    )  # fmt: skip
    assert [row["schedule/actor.eps_high"] for row in steps.rows] == pytest.approx([0.1, 0.2, 0.3])
    assert [row["policy/lag"] for row in steps.rows][1] > 0
    return steps
