"""Checkpoints: exact, atomic, verified; a failed write, a killed writer and another configuration."""

import json
import random
import resource
import shutil

import numpy as np
import pytest
import torch

from rolltree.engine.app.config import FREE_TO_CHANGE, training_config
from rolltree.engine.app.keys import config_keys
from rolltree.engine.errors import RunError, UserError
from rolltree.engine.settings import TrainConfig
from rolltree.engine.train import checkpoint
from rolltree.engine.train.checkpoint import (
    Saved,
    latest,
    load,
    load_latest,
    read_tensors,
    restore_generators,
    write_tensors,
)

from ...support.forks import forked

TENSORS = {
    "weight.a": torch.tensor([[0.1, -0.0, torch.inf], [torch.nan, 1e-42, 3.0]]),
    "weight.b": torch.arange(4, dtype=torch.bfloat16).reshape(2, 2).T,  # not contiguous
    "step.a": torch.tensor(3.0),
    "empty": torch.zeros(0, 3),
}
LEARNED = {"updates": 3}
STATE = {"prompts": {"cursor": 7, "big": 2**60}, "accuracy": 0.1 + 0.2, "text": "ü"}


def config(**sections):
    return TrainConfig.model_validate(
        {"name": "run", "model": {"path": "m"}, "data": {"tasks": [{"name": "chain_sum"}]}, **sections}
    )


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def save(directory, step, tensors=TENSORS, state=STATE, keep=2):
    """Save ``tensors`` as the run's and again as the learner's."""
    return checkpoint.save(
        directory,
        step,
        learner=lambda path: Saved(write_tensors(path, tensors), LEARNED),
        tensors=tensors,
        state=state,
        trained=training_config(config()),
        keep=keep,
    )


def test_round_trip_is_bit_exact(tmp_path):
    path = save(tmp_path, 12, TENSORS, STATE, keep=2)
    assert path == tmp_path / "step_000012" == latest(tmp_path)
    loaded = load(path)
    assert (loaded.path, loaded.step, loaded.state) == (path, 12, STATE | {"learner": LEARNED})
    for found in (loaded.tensors, read_tensors(loaded.learner)):
        assert found.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert found[name].dtype == tensor.dtype
            assert found[name].shape == tensor.shape
            assert bits(found[name]) == bits(tensor)
    assert sorted(p.name for p in path.iterdir()) == ["learner", "manifest.json", "run.safetensors", "state.json"]


def test_the_newest_are_kept_in_order_of_step(tmp_path):
    for step in (1, 2, 30, 1000000):
        save(tmp_path, step, TENSORS, STATE, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000030", "step_1000000"]
    assert latest(tmp_path) == tmp_path / "step_1000000"


def test_leftovers_of_a_killed_run_are_no_checkpoints(tmp_path):
    assert latest(tmp_path / "none") is None
    (tmp_path / "step_000009.tmp").mkdir()
    assert latest(tmp_path) is None
    save(tmp_path, 3, TENSORS, STATE, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000003"]


@pytest.mark.parametrize("part", ["run.safetensors", "learner/shard-00001-model-00001-of-00001.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "add", "state", "manifest", "no manifest"])
def test_damage_is_named_and_never_passed_over(tmp_path, damage, part):
    older = save(tmp_path, 1, TENSORS, STATE, keep=2)
    path = save(tmp_path, 2, TENSORS, STATE, keep=2)
    tensors, manifest = path / part, path / "manifest.json"
    name = part
    if damage == "flip":
        content = bytearray(tensors.read_bytes())
        content[-1] ^= 1
        tensors.write_bytes(content)
    elif damage == "cut":
        tensors.write_bytes(tensors.read_bytes()[:-1])
    elif damage == "remove":
        tensors.unlink()
    elif damage == "add":
        name = "learner/other.safetensors"
        shutil.copy(tensors, path / name)
    elif damage == "state":
        name = "state.json"
        (path / name).write_text(json.dumps(STATE | {"accuracy": 1.0}))
    else:
        name = "manifest.json"
        manifest.write_text("{") if damage == "manifest" else manifest.unlink()
    assert latest(tmp_path) == path
    with pytest.raises(UserError) as error:
        load(path)
    for part in (str(path), name, "move that directory away", str(older)):
        assert part in str(error.value)
    shutil.rmtree(older)
    with pytest.raises(UserError, match="there is no older one"):
        load(path)


def test_another_format_is_refused(tmp_path):
    path = save(tmp_path, 1, TENSORS, STATE, keep=1)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(UserError, match="format 99"):
        load(path)


@pytest.mark.parametrize("big", ["tensors", "state"])
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path, big):
    previous = save(tmp_path, 1, TENSORS, STATE, keep=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    tensors = {"weight": torch.zeros(1 << 18)} if big == "tensors" else TENSORS
    state = {"text": "x" * (1 << 20)} if big == "state" else STATE
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # Python ignores SIGXFSZ, so writing fails
    try:
        with pytest.raises(RunError, match=r"step_000002' could not be written .*step_000001' is intact.*--resume"):
            save(tmp_path, 2, tensors, state, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    assert load(previous).state == STATE | {"learner": LEARNED}


def write(directory):
    for step in range(1, 100000):
        tensors = {"w": torch.full((200_000,), float(step))}
        learner = lambda path, tensors=tensors: Saved(write_tensors(path, tensors), {})  # noqa: E731
        checkpoint.save(directory, step, learner=learner, tensors=tensors, state={"step": step}, trained={}, keep=2)
        print(step)


def test_killed_while_writing_or_removing(tmp_path):
    """Whatever kill -9 leaves, the newest checkpoint is whole, and at most one save behind what was announced."""
    pause = random.Random(5)
    with forked(write, tmp_path) as (process, printed):
        said = "".join(printed.readline() for _ in range(5))
        process.join(pause.uniform(0.05, 0.2))
        assert process.is_alive()
        process.kill()
        announced = int((said + printed.read()).split()[-1])  # a slow disk may have written none since
    loaded = load(latest(tmp_path))
    assert loaded.step in (announced, announced + 1)
    assert loaded.state == {"step": loaded.step, "learner": {}}
    assert all((found["w"] == loaded.step).all() for found in (loaded.tensors, read_tensors(loaded.learner)))


def test_generators_continue_where_they_were(tmp_path):
    def draw():
        return torch.rand(3).tolist(), np.random.standard_normal(3).tolist(), random.gauss(), random.random()

    draw()
    path = save(tmp_path, 1)
    expected = draw()
    restore_generators(*load(path).generators)
    assert draw() == expected


def test_settings_that_decide_what_is_learned_must_agree(tmp_path):
    path = save(tmp_path, 4)
    longer = config(trainer={"steps": 999}, checkpoint={"every": 1}, output_dir="elsewhere", name="other")
    for same in (config(), longer):
        assert load_latest(tmp_path, training_config(same)).path == path
    for key, changed in (
        ("trainer.lr", config(trainer={"lr": 0.5})),
        ("seed", config(seed=1)),
        ("data.tasks", config(data={"tasks": [{"name": "chain_sum", "options": {"min_terms": 3}}]})),
        ("algorithm.objective_options", config(algorithm={"objective_options": {"eps_high": 0.3}})),
        ("evaluation.problems", config(evaluation={"problems": 7})),  # it decides which problems are held out
    ):
        with pytest.raises(UserError, match=rf"`{key}` is .* was trained with .*set it back"):
            load_latest(tmp_path, training_config(changed))


def test_nothing_to_resume(tmp_path):
    (tmp_path / "step_000001.tmp").mkdir()
    for directory in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match=r"nothing to resume.*start without --resume"):
            load_latest(directory, training_config(config()))


def test_free_keys_exist():
    assert set(FREE_TO_CHANGE) <= {key.key for key in config_keys()}
