"""``rolltree bench rows``: the time and memory that the rows of a file take up to the first drawn batch.

Each figure is of a process of its own, which loads the libraries first: the time after that, on the clock and of its
threads on the CPU, and how much its peak memory (VmHWM) rises. The rows have about 250 bytes, the last 64 are held out,
and a batch has 64 prompts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import torch

from rolltree.engine import UserError

from ..schema import Context, Row, append

FORMS = ("jsonl", "parquet")
FIGURES = (("clock", "time_ms"), ("CPU", "time_ms"), ("clock", "peak_memory_mib"))
"""Direction and metric of each figure."""
BATCH, HELD_OUT, WORDS = 64, 64, 36
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="rolltree bench rows", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000], metavar="N", help="rows of a file")
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS, help="forms of files (default: both)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="repetitions (default 3)")
    parser.add_argument("--provider", default="rolltree", metavar="NAME", help="name of this code in the rows")
    parser.add_argument("--out", type=Path, metavar="DIR", help="append rows to rows.jsonl here")
    parser.add_argument("--of", type=Path, metavar="FILE", help="only measure this file, in this process")
    args = parser.parse_args(argv)
    if args.of is not None:
        print(json.dumps(_measured(args.of)))
        return 0
    try:
        with tempfile.TemporaryDirectory() as home:
            for count in args.rows:
                for form in args.forms:
                    _case(Path(home), count, form, args)
    except UserError as error:
        print(f"rolltree bench rows: {error}", file=sys.stderr)
        return 2
    return 0


def _case(home: Path, count: int, form: str, args: argparse.Namespace) -> None:
    file = home / f"rows.{form}"
    _write(file, count)
    measured = np.array([_in_a_process(file) for _ in range(args.rounds)])
    file.unlink()
    context, rows = Context.of(torch.device("cpu")), []
    for (direction, metric), values in zip(FIGURES, measured.T, strict=True):
        low, middle, high = np.percentile(values, (20, 50, 80)).tolist()
        case = f"{count:,} rows of .{form}"
        rows.append(Row("rows", case, args.provider, direction, metric, middle, low, high, None,
                        context.device, context.versions, context.commit, context.time))  # fmt: skip
        print(f"{case}, {args.provider}, {direction}: {metric} {middle:,.1f} ({low:,.1f} to {high:,.1f})", flush=True)
    if args.out is not None:
        append(rows, args.out / "rows.jsonl")


def _in_a_process(file: Path) -> list[float]:
    command = [sys.executable, "-m", "rolltree.bench", "rows", "--of", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"the process that reads '{file.name}' failed: {done.stderr.strip().splitlines()[-1]}.")
    figures: list[float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _words() -> list[str]:
    return sorted(map("".join, product("abcdefgh", repeat=4)))


def _write(file: Path, count: int) -> None:
    """Write ``count`` different rows: problems of words, with an answer and a source."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw, words = np.random.default_rng(0), np.array(_words())
    schema = pa.schema({"prompt": pa.string(), "answer": pa.string(), "source": pa.string()})
    writer = pq.ParquetWriter(file, schema) if file.suffix == ".parquet" else file.open("w")
    with writer:
        for begin in range(0, count, 10_000):
            drawn = words[draw.integers(0, len(words), (min(10_000, count - begin), WORDS))]
            rows = [
                {"prompt": f"Problem {n}: {' '.join(problem)}", "answer": str(n % 997), "source": f"made up/{n % 7}"}
                for n, problem in enumerate(drawn, begin)
            ]
            if isinstance(writer, pq.ParquetWriter):
                writer.write_table(pa.Table.from_pylist(rows, schema), row_group_size=10_000)
            else:
                writer.writelines(json.dumps(row) + "\n" for row in rows)


def _measured(file: Path) -> list[float]:
    """Return `FIGURES` up to the first batch of ``file``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from rolltree.engine.prompts.prompts import held_out
    from rolltree.engine.prompts.sources import PromptSource
    from rolltree.engine.settings import DataConfig

    of_words = Tokenizer(models.WordLevel({"<unk>": 0, **{word: i for i, word in enumerate(_words(), 1)}}, "<unk>"))
    of_words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=of_words)
    tokenizer.chat_template = CHAT
    before, begin, began = _peak_mib(), time.perf_counter(), time.process_time()
    config = DataConfig(path=str(file), chat=True)
    source = PromptSource(config, tokenizer, 0, held_out(config, HELD_OUT, tokenizer))
    source.state_dict()  # the first checkpoint comes before the first batch
    assert len(source.next(BATCH)) == BATCH
    return [1e3 * (time.perf_counter() - begin), 1e3 * (time.process_time() - began), _peak_mib() - before]


def _peak_mib() -> float:
    """Return the largest resident memory of this process so far."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))
