"""Writes the problems of `curves_smollm2_mix.toml`: three tasks of reasoning_gym, each problem after worked examples.

python examples/smollm2_mix.py runs/data/smollm2_mix.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import reasoning_gym

TASKS = {
    "chain_sum": (10, {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    "products": (10, {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
    "number_filtering": (
        6,
        {"min_numbers": 3, "max_numbers": 4, "min_decimals": 0, "max_decimals": 0, "min_value": 0, "max_value": 99},
    ),
}
"""The number of worked examples and the options of the problems, by task."""
PROBLEMS = 4096


def main() -> None:
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    sets, begins = [], []
    for task, (examples, options) in TASKS.items():
        items = list(reasoning_gym.create_dataset(task, seed=7, size=examples + PROBLEMS, **options))
        sets.append(items[examples:])
        begins.append("".join(f"{asked(item)} {item['answer']}\n\n" for item in items[:examples]))
    with path.open("w") as file:
        for items in zip(*sets, strict=True):  # the tasks take turns
            for task, begin, item in zip(TASKS, begins, items, strict=True):
                row = {"prompt": begin + asked(item), "answer": item["answer"], "task": task}
                file.write(json.dumps(row) + "\n")


def asked(item: dict) -> str:
    return f"Question: {item['question'].strip()}\nAnswer:"


if __name__ == "__main__":
    main()
