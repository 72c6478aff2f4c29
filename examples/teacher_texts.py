"""Write a teacher's responses as demonstrations, for `sft` in examples/curves_distillation_cpu.toml.

python examples/teacher_texts.py runs/texts.parquet runs/texts.jsonl
"""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq


def main(rollouts: str, out: str) -> None:
    """Write prompt and response of each that has ended by itself; the run's template is added to prompts again."""
    rows = pq.read_table(rollouts, columns=["prompt_text", "response_text", "status"]).to_pylist()
    ended = [row for row in rows if row["status"] == "stop"]
    lines = [{"prompt": row["prompt_text"].removesuffix("\n"), "response": row["response_text"]} for row in ended]
    Path(out).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    print(f"{len(lines)} of {len(rows)} responses: {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
