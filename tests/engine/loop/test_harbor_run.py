"""Training on Harbor's tasks: plans and refusals before the run, and runs that are killed at random moments."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rolltree.engine.app.cli import main

from ...support.conversations import write_conversations
from ...support.harbor import IMAGE, OPTIONS, TASKS, containers, write_task, write_tasks
from ...support.processes import Process, Server
from ...support.resumed import untimed
from ...support.tiny import beside


def write_run(folder: Path, options: dict[str, Any], **tables: Any) -> Path:
    """Write a run on the tasks in the folder ``tasks``, and return its configuration."""
    program = {"environment": "harbor", "max_turns": 2, "turn_tokens": 12, "environment_options": options}
    given = {
        "data": {"source": None, "source_options": None, "path": str(folder / "tasks"), "max_prompt_tokens": 190},
        "rollout": {"program_options": program, "n": 4},
        "checkpoint": {"every": 1},
    }
    toml = write_conversations(folder)
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 512}))
    return beside(toml, "harbor", **given, **tables)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_killed_run_loses_no_reward_and_leaves_no_container(tmp_path: Path, server: Server, podman: None) -> None:
    """A hundred episodes whose rewards tell the task, with a kill in most steps; the whole run is the same."""
    for number, name in enumerate(sorted(TASKS)):
        test = f"#!/bin/sh\necho {(number + 1) / 16} > /logs/verifier/reward.txt"
        write_task(tmp_path / "tasks", name, test=test)
    steps, prompts, n = 13, 2, 4
    run = write_run(tmp_path, OPTIONS | {"containers": 4}, trainer={"steps": steps, "prompts_per_step": prompts})
    rng, kills = random.Random(0), 0

    def flags(name: str) -> list[str]:
        return ["train", str(run), f"--output_dir={tmp_path / name}"]

    assert Process(server, flags("whole")).wait() == 0
    directory = tmp_path / "killed" / "tiny"
    process = Process(server, flags("killed"))
    while not process.ended():
        log = directory / "metrics.jsonl"
        process.await_row(log, rng.randrange(1, 3) + (len(untimed(directory)) if log.exists() else 0))
        time.sleep(rng.random() * 4)
        if not process.ended():
            kills += 1
            process.kill()
            resume = ["--resume"] if list((directory / "checkpoints").glob("step_*")) else []
            process = Process(server, flags("killed") + resume)
    assert process.wait() == 0
    assert kills >= 3
    until(lambda: not containers())
    whole = tmp_path / "whole" / "tiny"
    assert [row["step"] for row in untimed(directory)] == list(range(steps + 1))
    assert untimed(directory) == untimed(whole)
    rewards = [reward for file in sorted((directory / "rollouts").glob("*.parquet")) for reward in of_file(file)]
    assert len(rewards) == steps * prompts * n
    assert {round(16 * reward) for reward in rewards} <= set(range(1, 11))


def of_file(file: Path) -> list[float]:
    table = pq.read_table(file).to_pydict()
    rewards = [reward for row in table["reward"] for reward in (row if isinstance(row, list) else [row])]
    assert not any(math.isnan(reward) for reward in rewards)
    return rewards


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_plan_builds_the_images_and_starts_a_container(tmp_path, capsys, podman) -> None:
    write_tasks(tmp_path / "tasks")
    run = write_run(tmp_path, OPTIONS)
    assert main(["train", str(run), "--dry-run"]) == 0
    assert f"10 rows of '{tmp_path / 'tasks'}'" in capsys.readouterr().out
    write_task(tmp_path / "tasks", "zz", toml=f'[environment]\ndocker_image = "{IMAGE}x"')
    assert main(["train", str(run), "--dry-run"]) == 2
    assert f"has the image '{IMAGE}x', which is not here" in " ".join(capsys.readouterr().err.split())
    assert not containers()
