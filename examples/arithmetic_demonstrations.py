"""``python examples/arithmetic_demonstrations.py`` writes the worked solutions for `sft_then_rl_cpu.toml`.

Held-out problems are excluded.
"""

from __future__ import annotations

import json
from pathlib import Path

from arithmetic_warmup import SEED, worked

from rolltree.engine import load_config
from rolltree.engine.prompts.prompts import HELD_OUT
from rolltree.engine.tasks import GymProblems

COUNT = 4096
TARGET = Path("runs/arithmetic_solutions.jsonl")


def main() -> None:
    config = load_config(Path(__file__).with_name("sft_then_rl_cpu.toml"))
    held_out = GymProblems(config.data.tasks, [HELD_OUT])
    excluded = {held_out[k].text for k in range(4 * config.evaluation.problems)}
    problems = GymProblems(config.data.tasks, [SEED, 2])
    rows = []
    for k in range(2 * COUNT):
        problem = problems[k]
        if problem.text not in excluded and len(rows) < COUNT:
            rows.append({"prompt": problem.text, "response": worked(problem.entry)})
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} worked solutions in {TARGET}")


if __name__ == "__main__":
    main()
