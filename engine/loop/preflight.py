"""What can be known to be wrong before a run has a directory, a model or hours behind it.

`rolltree train` and ``--dry-run`` make the same checks, so that neither promises what the other refuses.
"""

from __future__ import annotations

import copy
import fcntl
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..data.tree import TokenTree
from ..errors import UserError
from ..methods.credit import CreditFunction, give_credit
from ..parts.calling import ask, call
from ..programs import GroupState, RolloutProgram
from ..train import checkpoint
from .sources import Prompt

TRIED = 8
"""Prompts whose groups are begun to see whether the program can."""
TAKEN_OVER = {".lock", "config.toml", "checkpoints"}
"""What a run that ended before its first checkpoint leaves behind."""


def holds_a_run(directory: Path) -> bool:
    """Whether ``directory`` holds anything worth keeping; what a run left that never got to a checkpoint is not."""
    if not directory.is_dir():
        return False
    if checkpoint.latest(directory / "checkpoints") is not None:
        return True
    return any(path.name not in TAKEN_OVER for path in directory.iterdir())


def check_writable(directory: Path) -> None:
    """Nothing is made here: the directory is looked for, and the nearest that is there.

    Raises:
        UserError: ``directory`` cannot be made or written.
    """
    there = directory
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise UserError(
            f"The run directory '{directory}' cannot be made: '{there}' is no directory; choose another --output_dir."
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(
            f"The run directory '{directory}' cannot be written: '{there}' allows no writing; choose another "
            "--output_dir."
        )


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Make the run's directory and hold it against other processes; the lock goes with the process, however it ends.

    Raises:
        UserError: it cannot be made, or another process holds it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / ".lock").open("w")
    except OSError as error:
        raise UserError(
            f"The run directory '{directory}' cannot be made: {error.strerror}; choose another --output_dir."
        ) from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"Another process is writing the run '{directory}'; wait for it, or choose another --name."
            ) from None
        yield


def check_directory(directory: Path) -> None:
    """Refuse a directory that cannot be written or that holds another run.

    Raises:
        UserError: either is so.
    """
    check_writable(directory)
    if holds_a_run(directory):
        raise UserError(
            f"'{directory}' already holds a run; continue it with --resume, or choose another --name or --output_dir."
        )


def check_program(
    program: RolloutProgram,
    name: str,
    n: int,
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int],
    prompts: Sequence[Prompt],
) -> None:
    """Begin a group of ``n`` responses, or of as many as its prompt asks for, for each prompt, without sampling it.

    Args:
        program: tried as it is, and ``name`` its configured name.
        n: responses of a prompt that asks for no number of its own.
        ends: the model's end-of-sequence tokens.

    Raises:
        UserError: the program refuses, as with a number of responses that it cannot make.
    """
    what = f"rollout.program = '{name}'"
    for prompt in prompts:
        mine = call(what, copy.deepcopy, program)
        mine.tokenizer, mine.end_token_ids, mine.context = tokenizer, ends, prompt.context
        begun = ask(what, mine.start, GroupState(prompt.n or n, 0, 0, 0, 0))
        if not isinstance(begun, int) or begun < 1:
            raise UserError(f"{what} begins with {begun!r} branches; `start` must answer an integer of at least 1.")


def check_credit(credit: CreditFunction, name: str, n: int, columns: Sequence[str]) -> None:
    """Give credit to two made-up groups.

    Args:
        credit: the estimator to try, and ``name`` its configured name.
        n: responses of a group; at most 64 are made up.
        columns: token columns that roles score.

    Raises:
        UserError: the estimator fails, or does not answer with finite numbers of the right shape.
    """
    give_credit(credit, name, [_made_up(min(n, 64), columns, shift) for shift in (0, 1)])


def _made_up(leaves: int, columns: Sequence[str], shift: int) -> TokenTree:
    """Make responses of one to three tokens that share beginnings, some right and some wrong, scored by every role."""
    responses = [[1 + leaf % 2, *range(3, 3 + leaf % 3)] for leaf in range(leaves)]
    tree = TokenTree.from_sequences([0], responses, behaviour_logprobs=[np.full(len(r), -1.0) for r in responses])
    tree.rewards["reward"] = ((np.arange(leaves) + shift) % 2).astype(np.float32)
    for column in columns:
        tree.set(column, np.full(tree.num_tokens, -1.0))
    tree.meta |= {"prompt_id": f"made-up/{shift}", "task": "made-up", "prompt_text": ""}
    return tree
