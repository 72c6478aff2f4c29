"""Runs of recipes on a file of problems with columns, and what their tests read of the trees."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rolltree.engine.data.segment import Origin
from rolltree.engine.data.tree import TokenTree

from ...support.real_step import Steps, take_steps
from ...support.tiny import GIVEN, NO_METHOD, beside, write_job

MINE = """
def odd(text, entry):
    return float(sum(map(ord, text)) % 2)

def seldom(text, entry):
    return float(sum(map(ord, text)) % 6 == 0)

def by_level(text, entry):
    return float(sum(map(ord, text)) % 5 < int(entry["difficulty"]) - 1)

def named(text, entry):
    value = odd(text, entry)
    return {"reward": value, "flaw": float(len(text) % 2), "a": value - len(text) % 3, "b": len(text) % 5 / 5 - 0.5}

def steps(text, entry):
    cuts = [i for i in (2, 5) if i < len(text)]
    spans = [(0, cut, [1.0, -1.0, -0.5][sum(map(ord, text[:cut])) % 3]) for cut in cuts]
    return {"reward": odd(text, entry), "spans": spans}
"""
PROGRAMS = """
from rolltree.engine.data.segment import Origin
from rolltree.engine.programs import Fork, Given, RolloutProgram

class Told(RolloutProgram):
    segment_tokens = 4

    def start(self, group):
        return group.width

    def decide(self, group, finished):
        for segment in finished:
            if segment.status is None:
                told = Given([5 + len(segment.branch), 6], Origin.OBSERVATION) if segment.depth == 1 else None
                yield Fork(segment.branch, append=told)
"""
SEEDED = {"masa": 8, "e2c": 8, "v_05": 4, "visurf": 4, "hpt": 3, "ampo": 3}
"""Responses to a prompt, if not 4."""
LONG = ("--rollout.max_new_tokens=40", "--rollout.n=8", "--trainer.prompts_per_step=24")
"""So many tokens that the random model ends some responses itself."""
PROBED = ("--rollout.program_options={{segment_tokens=3,probes=2,ask='e',answer_tokens=2}}", "--rollout.n=3")
SEEN: dict[str, tuple[str, ...]] = {
    "v_0": (
        "--data.curriculum_options={{least=2,most=6}}", "--trainer.steps=4", "--trainer.prompts_per_step=8",
        "--trainer.updates_per_step=1",
    ),
    "v_05": ("--trainer.steps=4", "--trainer.prompts_per_step=8", "--trainer.updates_per_step=1"),
    "mrt": (*PROBED, "--algorithm.advantage_options={{per='response'}}"),
}  # fmt: skip
"""Other runs of a recipe: predictions from the groups seen before instead of a column, credit of responses."""
NEEDS: dict[str, tuple[str, ...]] = {
    "prefix_rft": ("--rollout.temperature=0.1", "--trainer.lr=0.002"),
    "dr_po": ("--rollout.program_options={{column='solution',members=2}}",),
    "mrt": PROBED,
    "eight_x": (
        "--rollout.program_options={{segment_tokens=0,probes=2,stop=['e'],ask='',answer_tokens=0}}", "--rollout.n=2",
    ),
    "gtr": (
        "--algorithm.select_options={{begin='',end='e'}}", "--loop.callback_options.column=solution",
        "--algorithm.terms=[{{name='thoughts',select_options={{begin='',end='='}}}}]",
    ),
    "masa": (
        "--rollout.program_options={{question='? ',members=2}}", "--model.path={folder}/digits",
        "--trainer.prompts_per_step=24",
    ),
    "v_0": ("--data.curriculum_options={{column='prior',least=2,most=6}}", "--trainer.prompts_per_step=12"),
    "v_05": ("--algorithm.advantage_options={{column='prior'}}", "--loop.callback_options={{column='prior'}}"),
    "remax": ("--reward.verifier={folder}/mine.py:by_level", "--trainer.prompts_per_step=12"),
    "multi_temperature": ("--rollout.program_options={{temperatures=[0.5,2.0]}}",),
    "hpt": ("--reward.verifier={folder}/mine.py:seldom",),
    "ampo": ("--reward.verifier={folder}/mine.py:seldom",),
    "igrpo": ("--loop.callback_options={{template='{{prompt}} after {{draft}}'}}",),
    "ufo": ("--rollout.program_options={{text=' again ',tries=3}}", *LONG),
    "vl_rethinker": (*LONG, "--trainer.steps=3"),
    "e2c": ("--rollout.program_options={{plans=4,plan_end='e'}}",),
    "ead": ("--rollout.program_options={{decay=8.0,least=0.5,segment_tokens=2}}",),
    "think_short": ("--reward.shaping=[{{name='length_budget',options={{share=0.5,budget=6}}}}]",),
    "reward_ensemble": (
        "--reward.verifier={folder}/mine.py:named",
        "--reward.shaping=[{{name='ensemble',options={{names=['a','b']}}}}]",
    ),
    "fapo": ("--reward.verifier={folder}/mine.py:named",),
    "reasoning_sql": (
        "--reward.verifier={folder}/mine.py:named",
        "--reward.shaping=[{{name='weighted',options={{weights={{a=1.5,b=-0.5}}}}}}]",
    ),
    "chatshopbuddy": (
        "--reward.verifier={folder}/mine.py:named",
        "--reward.shaping=[{{name='gated',options={{gate='flaw'}}}}]",
    ),
    "outcome_exploration": (
        "--reward.shaping=[{{name='exploration',options={{bonus=0.1,repeated=0.05,pattern='^(\\S)'}}}}]",
        "--trainer.prompts_per_step=3", "--trainer.steps=8", "--trainer.updates_per_step=1",
    ),
    "self_rewarding_ppo": ("--roles.teacher={{path='{folder}/other'}}", "--algorithm.advantage_options.gamma=0.9"),
    "fgrpo": (
        "--reward.verifier={folder}/mine.py:named", "--trainer.steps=3",
        "--algorithm.advantage_options={{targets={{a=0.9,b=-5.0}},rate=0.5}}",
    ),
    "dcpo": ("--trainer.prompts_per_step=12", "--trainer.steps=3", "--trainer.updates_per_step=1"),
    "gvm": (
        "--data.curriculum_options={{n=4,pilot=2,alpha=0.5,beta=2.0,most=9}}", "--trainer.steps=4",
        "--trainer.prompts_per_step=12", "--trainer.updates_per_step=1", "--rollout.temperature=0.1",
    ),
    "drive": (
        "--data.curriculum_options={{after=2,keep=0.25,n=5}}", "--trainer.steps=4", "--trainer.prompts_per_step=12",
        "--trainer.updates_per_step=1",
    ),
    "qwenlong_l1": ("--trainer.steps=4", "--trainer.prompts_per_step=12", "--trainer.updates_per_step=1"),
    "limr": (
        "--data.curriculum_options={{epochs=2,least=0.6}}", "--trainer.steps=5", "--trainer.prompts_per_step=12",
        "--trainer.updates_per_step=1",
    ),
    "ariadne": (
        "--reward.verifier={folder}/mine.py:by_level", "--trainer.steps=5", "--trainer.prompts_per_step=4",
        "--data.curriculum_options={{start=2,rise=1,window=4,above=0.1}}", "--trainer.updates_per_step=1",
    ),
    "rl_plus": ("--algorithm.terms=[{{name='external',loss_options={{gamma=2.0}}}}]",),
    "reg_grpo": ("--algorithm.terms=[{{name='regression',loss_options={{beta=0.5}}}}]",),
    "copg": ("--algorithm.terms=[{{name='regression',loss_options={{beta=0.5}}}}]", "--trainer.steps=2"),
    "capo": ("--reward.verifier={folder}/mine.py:steps",),
    "process_rewards": ("--reward.verifier={folder}/mine.py:steps",),
    "canon_entropy": ("--rollout.temperature=0.1", "--trainer.lr=0.002", "--trainer.prompts_per_step=12"),
    "recap": (
        "--reward.verifier={folder}/mine.py:named", "--trainer.steps=4", "--trainer.updates_per_step=1",
        "--algorithm.advantage_options={{names=['a','b'],window=2}}",
    ),
    "rae": (
        "--reward.verifier={folder}/mine.py:named", "--trainer.steps=4", "--trainer.updates_per_step=1",
        "--algorithm.advantage_options={{rewards={{policy='a'}},decay=0.5}}",
    ),
    "rlsp": (
        "--trainer.steps=2", "--reward.parts=[{{name='outcome',verifier='{folder}/mine.py:by_level'}},"
        "{{name='exploration',verifier='{folder}/mine.py:odd',weight=[[1,0.5],[3,0.0]]}}]",
    ),
    "format_length": (
        "--trainer.steps=2",
        "--reward.shaping=[{{name='length_peak',options={{share={{schedule=[[1,1.0],[3,0.0]]}}}}}}]",
    ),
    "puzzlecraft": ("--algorithm.advantage_options={{pattern='^(\\S)'}}", "--trainer.prompts_per_step=12"),
    "critique_grpo": (
        "--reward.verifier={folder}/mine.py:seldom", "--trainer.prompts_per_step=12", "--data.max_prompt_tokens=100",
        "--loop.callback_options={{template='{{prompt}} not {{draft}}'}}",
    ),
    "rltf_sd": (
        "--reward.verifier={folder}/mine.py:seldom", "--trainer.updates_per_step=1", "--data.max_prompt_tokens=100",
        "--loop.callback_options={{keep='refined',template='{{prompt}} not {{draft}}'}}",
    ),
    "cog_rethinker": (
        "--reward.verifier={folder}/mine.py:seldom", "--trainer.prompts_per_step=12", "--data.max_prompt_tokens=100",
        "--loop.callback_options={{failed=true,template='{{prompt}} not {{draft}}'}}",
    ),
    "rltf_fm": ("--rollout.program={folder}/programs.py:Told",),
    "itool": ("--rollout.program_options={{segment_tokens=3,expansions=2,branch=2}}", "--trainer.prompts_per_step=12"),
    "knapsack": (
        "--data.curriculum_options={{n=6,most=12,pool=100.0,by='difficulty'}}", "--trainer.steps=4",
        "--trainer.prompts_per_step=12", "--trainer.updates_per_step=1", "--reward.verifier={folder}/mine.py:by_level",
    ),
    "sgpo": (
        "--data.curriculum_options={{profile=3,scale=2.0,least=2,most=7,unsolved=0.0}}", "--trainer.steps=4",
        "--trainer.prompts_per_step=12", "--trainer.updates_per_step=1",
    ),
    "greso": ("--trainer.steps=5", "--data.curriculum_options={{begin=0.6,rate=0.1}}", "--rollout.n=2"),
    "speed_rl": ("--rollout.n=3", "--loop.callback_options={{n=7}}", "--trainer.steps=2"),
    "aero": ("--trainer.steps=2", "--trainer.prompts_per_step=24"),
    "fifo_replay": ("--trainer.steps=4", "--replay.age=2"),
    "interplay": ("--trainer.steps=3", "--trainer.prompts_per_step=12", "--trainer.updates_per_step=1"),
}  # fmt: skip
"""Keys that a recipe asks for, and sizes that fit the tiny model."""
IN_CI = ("prefix_rft", "masa", "v_05", "gvm")


def marked(*names: str) -> list[Any]:
    return [name if name in IN_CI else pytest.param(name, marks=pytest.mark.methods) for name in names]


def write_problems(directory: Path) -> Path:
    """Write a run on 24 problems with columns; return its TOML."""
    rows = [
        {
            "prompt": f"{a} + 3 =", "answer": str(a + 3), "solution": f"{a}+3={a + 3}",
            "prior": [0.0, 0.25, 0.5, 0.75, 0.9, 1.0][a % 6], "difficulty": 2 + a % 3,
        }
        for a in range(24)
    ]  # fmt: skip
    path = write_job(
        directory, {"mine.py": MINE, "programs.py": PROGRAMS, "given.jsonl": GIVEN, "problems.jsonl": rows},
        data={"tasks": None, "path": "FOLDER/problems.jsonl"}, reward={"verifier": "mine.py:odd"},
        rollout={**NO_METHOD["rollout"], "n": None}, algorithm=NO_METHOD["algorithm"],
    )  # fmt: skip
    beside(path, "bare", reward={"verifier": None})
    return path


def write_digits(folder: Path) -> None:
    """Write a model that often says 0, 1, spaces and points."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model", tie_word_embeddings=False))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    with torch.no_grad():
        model.get_output_embeddings().weight[tokenizer("01 .", add_special_tokens=False)["input_ids"]] *= 40
    model.save_pretrained(folder / "digits")
    tokenizer.save_pretrained(folder / "digits")


def steps_of_recipes(toml: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Steps]:
    """Return a function that takes the steps of a recipe, once; of ``NAME/seen`` as `SEEN` has it."""

    @functools.cache
    def take(name: str) -> Steps:
        if name == "self_rewarding_ppo" and not (toml.parent / "other").exists():
            torch.manual_seed(5)
            config = AutoConfig.from_pretrained(toml.parent / "model")
            AutoModelForCausalLM.from_config(config).save_pretrained(toml.parent / "other")
        if name == "masa" and not (toml.parent / "digits").exists():
            write_digits(toml.parent)
        name, _, seen = name.partition("/")
        needs = [text.format(folder=toml.parent) for text in (SEEN if seen else NEEDS).get(name, ())]
        common = (
            "--trainer.updates_per_step=2", "--trainer.lr=0.02", "--trainer.max_tokens=4096",
            "--trainer.self_check=false", "--trainer.prompts_per_step=6", f"--rollout.n={SEEDED.get(name, 4)}",
        )  # fmt: skip
        file = toml.parent / "bare.toml" if name in ("rlpr", "verifree", "rlsp") else toml
        return take_steps(
            file, tmp_path_factory.mktemp(name), *common, f"--recipe={name}", *needs,
            unset=("rollout.program", "rollout.program_options", "algorithm.advantage"),
        )  # fmt: skip

    return take


def row_of(tree: TokenTree, toml: Path) -> dict[str, Any]:
    """Return the problem's row, from the data itself."""
    rows = [json.loads(line) for line in (toml.parent / "problems.jsonl").read_text().splitlines()]
    return rows[int(tree.meta["prompt_id"].rpartition("/")[2])]


def by_step(steps: Steps, updates: int = 1) -> list[list[TokenTree]]:
    """Return the trees of each step."""
    return [
        [tree for update in steps.updates[k : k + updates] for tree in update.trees]
        for k in range(0, len(steps.updates), updates)
    ]


def ids(steps: Steps) -> list[list[str]]:
    return [[tree.meta["prompt_id"] for tree in trees] for trees in by_step(steps)]


def sd(x: np.ndarray) -> float:
    return float(np.sqrt(((x - x.mean()) ** 2).sum() / max(len(x) - 1, 1)))


def norm(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return (x - x.mean()) / (sd(x) + 1e-6)


def clipped(lp: torch.Tensor, old: torch.Tensor, A: float) -> torch.Tensor:
    r = (lp - old).exp()
    return -torch.minimum(r * A, r.clamp(0.8, 1.2) * A)


def given_part(tree: TokenTree, leaf: int) -> tuple[list[int], np.ndarray]:
    """Return the given tokens of a response, and where they are in it."""
    rows = tree.response_rows(leaf)
    given = tree.origin[rows] == Origin.INJECTED
    return tree.token_id[rows[given]].tolist(), given
