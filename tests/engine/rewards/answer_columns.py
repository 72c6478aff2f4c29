"""Tries the verifier `math` on the answer columns of files: `make columns FILES="gsm8k/test.jsonl:answer ..."`.

Each row's reference gets two right responses, its own text in a box and in a sentence, and two wrong ones: the next
row's reference, and the first number of the reference where that is not all of it. Wrong ones that are paid are
printed, since rows can have equal answers in different writings.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rolltree.engine.rewards.answers import extract_answer
from rolltree.engine.rewards.math.mathematics import judge, read_reference
from rolltree.engine.rewards.references import reference_text
from rolltree.engine.tasks.rows import find_answer


def rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        yield from pq.read_table(path).to_pylist()
    elif path.suffix == ".json":
        yield from json.loads(path.read_text("utf-8-sig"))
    else:
        yield from (json.loads(line) for line in path.read_text("utf-8-sig").splitlines() if line.strip())


def measure(path: Path, key: str, limit: int) -> Counter[str]:
    """Return counts of a file's rows, references that cannot be read, and right and wrong responses by verdict."""
    found = Counter[str]()
    texts = []
    for row in rows(path):
        answer = find_answer(row, key)
        try:
            texts.append(reference_text(None if answer is None else answer[1]))
        except ValueError:
            found["no text"] += 1
        if len(texts) == limit:
            break
    for row, text in enumerate(texts):
        found["rows"] += 1
        try:
            reference = read_reference(text)
        except ValueError as error:
            found["unreadable"] += 1
            print(f"  {path.parent.name}: {error}")
            continue
        said = extract_answer(text) or text
        bare = re.sub(r"\$", "", said)
        for response in (f"So it is $\\boxed{{{bare}}}$.", f"The answer is {said}"):
            verdict = judge(response, reference)
            found["right"] += 1
            found["right paid"] += verdict == 1
            found["right unparsed"] += verdict is None
            if verdict != 1:
                print(f"  {path.parent.name}: {text[-60:]!r} not paid: {response[:90]!r}")
        other = texts[(row + 1) % len(texts)]
        other = extract_answer(other) or other
        first = re.search(r"\d+", said)
        wrong = [other] if other != said else []
        wrong += [first[0]] if first and not re.fullmatch(r"\D*0*\d+(?:\.0*)?\D*", said) else []
        for answer in wrong:
            verdict = judge(f"\\boxed{{{answer.replace('$', '')}}}", reference)
            found["wrong"] += 1
            found["wrong paid"] += verdict == 1
            found["wrong unparsed"] += verdict is None
            if verdict == 1:
                print(f"  {path.parent.name}: {text[-60:]!r} pays {answer[:60]!r}")
    return found


def main(files: list[str], limit: int = 300) -> None:
    table = []
    for file in files:
        name, _, key = file.rpartition(":")
        path = Path(name)
        if not path.is_file():
            raise SystemExit(f"{file!r} is no FILE:COLUMN: there is no file {path}")
        table.append((path, measure(path, key, limit)))
    heads = (
        "rows",
        "no text",
        "unreadable",
        "right",
        "right paid",
        "right unparsed",
        "wrong",
        "wrong paid",
        "wrong unparsed",
    )
    print("| set | " + " | ".join(heads) + " |\n|---|" + "---|" * len(heads))
    for path, found in table:
        print(f"| {path.parent.name}/{path.name} | " + " | ".join(str(found[head]) for head in heads) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
