"""Runs with engines of the real vLLM in processes of Ray: weights every step, and one is killed. `make vllm-scale`."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rolltree.engine.app.assembly import workers as build_workers
from rolltree.engine.fleet.fleet import Fleet
from rolltree.engine.fleet.host import Host
from rolltree.engine.loop.orchestrator import Orchestrator

from ...support.scale import Saboteur, train
from ..fleet.test_scale import strike_when_busy
from ..loop.test_durability import audit, rows
from ..programs.test_programs import text
from ..rollout.test_native_engine import EOS, letters
from .test_vllm import net

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, STRUCK, AGAIN = 8, 2, 5
"""Steps of a run; the step in which an engine is killed; the step that waits until its successor serves."""
WITHIN = 1e-6
"""Bound on the mean difference of probabilities between vLLM, on a CPU in fp32, and the trainer."""
MINE = """
def judge(text, entry):
    return float(len(set(text)) % 3 == 0)

def tool(call, context):
    with open(__file__ + ".calls", "a") as file:
        print(call, file=file)
    return call[-1:] or "\u0128"
"""
CONFIG = """
name = "tiny"
output_dir = "{folder}/runs"

[model]
path = "{folder}/model"

[data]
path = "{folder}/prompts.jsonl"
template = "{{prompt}}"
max_prompt_tokens = 16

[rollout]
n = 4
max_new_tokens = 24
kv_tokens = 4096

[reward]
verifier = "{folder}/mine.py:judge"
workers = 1

[algorithm]
advantage = "group_norm"

[trainer]
prompts_per_step = 6
lr = 1e-2
max_tokens = 256

[evaluation]
problems = 0

[checkpoint]
every = 1
"""


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a model whose heads are as wide as vLLM's kernels for the CPU take them."""
    folder = tmp_path_factory.mktemp("vllm")
    net().save_pretrained(folder / "model")
    tokenizer = letters()
    tokenizer.eos_token, tokenizer.pad_token = text(EOS), text(0)
    tokenizer.save_pretrained(folder / "model")
    (folder / "mine.py").write_text(MINE)
    lines = [json.dumps({"prompt": text(60 + i % 7, 70 + i, 80), "answer": "0"}) for i in range(48)]
    (folder / "prompts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "tiny.toml").write_text(CONFIG.format(folder=folder))
    return folder / "tiny.toml"


def arguments(toml: Path, program: str, engines: int) -> list[str]:
    options = {
        "treepo": "{segment_tokens=4,init=2}",
        "arpo": f'{{tool="{toml.parent}/mine.py:tool",call_start="{text(20)}",call_end="{text(21)}",'
        f'observation="{text(30)}{{}}",initial=2,probe_tokens=2}}',
    }
    return [
        f"--name={program}_{engines}", "--rollout.backend=vllm",
        "--rollout.vllm_options={enforce_eager=true,kv_cache_memory_bytes=67108864}", f"--rollout.engines={engines}",
        f"--rollout.program={program}", f"--rollout.program_options={options[program]}", f"--trainer.steps={STEPS}",
    ]  # fmt: skip


def differences(directory: Path) -> list[float]:
    return [row["training/rollout_probs_diff_mean"] for row in rows(directory)[1:]]


def kill(engine: Any) -> None:
    os.kill(engine.pid, signal.SIGKILL)


def killing(served: list[tuple[int, int, int]], run: Orchestrator) -> None:
    """Kill an engine with unfinished jobs once, wait later until its successor serves, and list who served: the step,
    the number of the engine, and its process."""
    fleet = run.sampler
    assert isinstance(fleet, Fleet)
    Saboteur(run, [(STRUCK, partial(strike_when_busy, fleet, kill))]).start()
    land, step = fleet._land, run._step

    def landed(engine: Any, *given: Any) -> None:
        land(engine, *given)
        served.append((run.step, engine.index, engine.pid))

    def stepped() -> None:
        while run.step == AGAIN and not all(engine.serving for engine in fleet._engines):
            fleet._round(0.2)
        step()

    fleet._land, run._step = landed, stepped  # type: ignore[method-assign]


@pytest.mark.parametrize("program", ["treepo", "arpo"])
def test_an_engine_that_is_killed_in_the_middle_of_its_work_loses_no_group(toml: Path, program: str) -> None:
    """The successor has the newest weights: the trainer finds the probabilities that vLLM in its own process has."""
    served: list[tuple[int, int, int]] = []
    config, run = train(toml, arguments(toml, program, 2), partial(killing, served))
    assert len(audit(config)) == STEPS * config.trainer.prompts_per_step
    assert sum(row.get("group/restarted_lost", 0) for row in rows(config.run_dir)) >= 1
    pids = {index: [pid for _, who, pid in served if who == index] for index in (0, 1)}
    assert sorted(len(set(found)) for found in pids.values()) == [1, 2]  # one was replaced, and both served
    assert {index for step, index, _ in served if step >= AGAIN} == {0, 1}
    assert run.controller.publication.difference is not None  # the check of published weights was on
    found = differences(config.run_dir)
    assert len(found) == STEPS
    assert max(found) < WITHIN
    if program == "arpo":
        assert (toml.parent / "mine.py.calls").read_text()
    print(program, "restarted", sum(row.get("group/restarted_lost", 0) for row in rows(config.run_dir)), found)


def test_in_one_process_the_difference_is_the_same(toml: Path) -> None:
    config, _ = train(toml, arguments(toml, "treepo", 0))
    found = differences(config.run_dir)
    assert max(found) < WITHIN
    print("one process", found)


def test_a_successor_that_serves_its_first_weights_shows_in_the_difference(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative: it names the new version, and samples with the weights of the model's directory."""
    marker, make = toml.parent / "started", build_workers.engine_host

    def forgetful(config: Any) -> Host:
        host = make(config)
        if marker.exists():
            use = host.call
            host.load = lambda buckets, version, keep_keys=False: use(  # type: ignore[method-assign]
                lambda: setattr(host.engine, "policy_version", version) or version
            )
        marker.touch()
        return host

    monkeypatch.setattr(build_workers, "engine_host", forgetful)
    given = [*arguments(toml, "treepo", 1), "--name=forgetful", "--trainer.self_check=false"]
    config, _ = train(toml, given, partial(killing, []))
    found = differences(config.run_dir)
    assert max(found[:STRUCK]) < WITHIN
    assert min(found[STRUCK + 1 :]) > 100 * WITHIN
    print("forgetful", found)
