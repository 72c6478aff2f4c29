"""Prompts of a run: a stream with a cursor that a checkpoint can hold, and the held-out problems it never gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..data.segment import LeafStatus, Origin, Segment
from ..data.tree import TokenTree
from ..errors import UserError
from ..settings import DataConfig, DemonstrationsConfig, TrainConfig
from ..tasks import GymProblems, Problem, read_problems

TRAIN, HELD_OUT = 0, 1
"""Streams of generated problems."""
GIVE_UP = 10_000
"""Held-out problems met in a row after which the source is taken to have no others."""


@dataclass(frozen=True)
class Prompt:
    id: str
    task: str
    text: str
    """The problem as the model is given it."""
    token_ids: list[int]
    entry: dict[str, Any]
    """What the verifier is given beside the response."""
    problem: str
    """The problem without template; training and held-out problems never share one."""


class PromptSource:
    """Training prompts in an order that follows from ``seed``; a file is shuffled anew for each pass over it.

    Args:
        held_out: prompts whose problems are never given.

    Raises:
        UserError: the tasks or the file cannot be used, a row is too long, or all rows are held out.
    """

    def __init__(
        self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, held_out: Sequence[Prompt] = ()
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._seed = seed
        self._excluded = {prompt.problem for prompt in held_out}
        self._cursor = 0
        self._order: tuple[int, list[int]] = (-1, [])  # a pass over the file, and its order
        self._rows: list[Prompt] = []
        if config.path is None:
            self._stream = GymProblems(config.tasks, [TRAIN, seed])
        else:
            problems = _read(config, config.path, "data.path")
            # all of them now: a row that is too long must not end a run in its third hour
            prompts = [make_prompt(problem, config, tokenizer) for problem in problems]
            self._rows = [prompt for prompt in prompts if prompt.problem not in self._excluded]
            if not self._rows:
                raise UserError(
                    f"All problems of '{config.path}' (data.path) are held out; lower evaluation.problems or add rows."
                )

    def next(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts.

        Raises:
            UserError: a prompt is longer than `data.max_prompt_tokens`, or every generated problem is held out.
        """
        prompts: list[Prompt] = []
        skipped = 0
        while len(prompts) < count:
            prompt = self._prompt(self._cursor)
            self._cursor += 1
            if prompt.problem in self._excluded:
                skipped += 1
                if skipped > GIVE_UP:
                    raise UserError(
                        "The tasks in data.tasks generate no problems that are not held out; make them harder or lower "
                        "evaluation.problems."
                    )
                continue
            skipped = 0
            prompts.append(prompt)
        return prompts

    def peek(self, count: int) -> list[Prompt]:
        """What `next` will give."""
        cursor = self._cursor
        try:
            return self.next(count)
        finally:
            self._cursor = cursor

    def state_dict(self) -> dict[str, int]:
        """Where the stream is; fit for JSON."""
        return {"cursor": self._cursor, "rows": len(self._rows)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue a saved stream.

        Raises:
            UserError: the file has another number of rows now, so its order would be another.
        """
        if state["rows"] != len(self._rows):
            raise UserError(
                f"The checkpoint was made with {state['rows']} training rows in '{self._config.path}' (data.path) and "
                f"there are {len(self._rows)} now; restore the file or start a run under another --name."
            )
        self._cursor = state["cursor"]

    def _prompt(self, cursor: int) -> Prompt:
        if not self._rows:
            return make_prompt(self._stream[cursor], self._config, self._tokenizer)
        turn, index = divmod(cursor, len(self._rows))
        if self._order[0] != turn:
            self._order = (turn, np.random.default_rng([self._seed, turn]).permutation(len(self._rows)).tolist())
        return self._rows[self._order[1][index]]


class Demonstrations:
    """Given responses, in an order that follows from ``seed``, a share of them for every update.

    Their tokens are injected: no part of a policy's loss, and there for a term that selects them.

    Raises:
        UserError: the file cannot be used.
    """

    def __init__(
        self, config: DemonstrationsConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int
    ) -> None:
        self.config, self.seed, self.cursor = config, seed, 0
        self._order: tuple[int, list[int]] = (-1, [])  # a pass over the file, and its order
        problems = read_problems(config.path, "demonstrations.path", config.prompt_key, config.response_key)
        self._trees = [self._tree(problem, data, tokenizer) for problem in problems]

    def next(self) -> list[TokenTree]:
        """The next ``per_step`` of them; the file is shuffled anew for each pass over it."""
        chosen = []
        for _ in range(self.config.per_step):
            turn, index = divmod(self.cursor, len(self._trees))
            if self._order[0] != turn:
                self._order = turn, np.random.default_rng([self.seed, turn]).permutation(len(self._trees)).tolist()
            tree = self._trees[self._order[1][index]]
            chosen.append(replace(tree, columns=dict(tree.columns), meta=dict(tree.meta)))
            self.cursor += 1
        return chosen

    def _tree(self, problem: Problem, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> TokenTree:
        prompt = make_prompt(problem, data, tokenizer)
        answer = str(problem.entry["answer"])
        ids = [*tokenizer(answer, add_special_tokens=False)["input_ids"], int(tokenizer.eos_token_id)]
        return TokenTree.from_nodes(
            [-1, 0],
            [Segment.prompt(prompt.token_ids), Segment.make(ids, origin=Origin.INJECTED)],
            [1],
            [LeafStatus.STOP],
        )


def held_out(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The evaluation's problems, the same for every seed of the run; each problem once.

    Raises:
        UserError: the file has too few rows, or the tasks too few different problems.
    """
    wanted = config.evaluation.problems
    if wanted == 0:
        return []
    data = config.data
    found: dict[str, Problem] = {}
    if data.path is None:
        stream = GymProblems(data.tasks, [HELD_OUT])
        for k in range(wanted + GIVE_UP):
            problem = stream[k]
            found.setdefault(problem.text, problem)
            if len(found) == wanted:
                break
    else:
        key = "data.path" if data.eval_path is None else "data.eval_path"
        rows = _read(data, data.eval_path or data.path, key)
        found = {problem.text: problem for problem in (rows[-wanted:] if data.eval_path is None else rows[:wanted])}
    if len(found) < wanted:
        raise UserError(
            f"evaluation.problems is {wanted}, but only {len(found)} different problems were found; lower it or add "
            "some."
        )
    return [make_prompt(problem, data, tokenizer) for problem in found.values()]


def make_prompt(problem: Problem, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """The problem in its template, as token ids.

    Raises:
        UserError: it is longer than `data.max_prompt_tokens`, or has no tokens.
    """
    text = config.template.replace("{prompt}", problem.text)
    if config.chat:
        if tokenizer.chat_template is None:
            raise UserError(
                "data.chat is set but the tokenizer has no chat template; set it to false and use data.template."
            )
        text = str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
            )
        )
    ids = list(tokenizer(text, add_special_tokens=not config.chat)["input_ids"])
    if len(ids) > config.max_prompt_tokens:
        raise UserError(
            f"The prompt '{problem.id}' is {len(ids)} tokens long, over data.max_prompt_tokens = "
            f"{config.max_prompt_tokens}; raise it or leave the prompt out."
        )
    if not ids:
        raise UserError(f"The prompt '{problem.id}' has no tokens; leave it out or give it a data.template.")
    return Prompt(problem.id, problem.task, text, ids, problem.entry, problem.text)


def _read(config: DataConfig, path: str, key: str) -> list[Problem]:
    return read_problems(path, key, config.prompt_key, config.answer_key)
