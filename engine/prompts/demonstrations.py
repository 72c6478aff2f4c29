"""Given responses that a run trains on, together with its rollouts or alone: `[[demonstrations]]`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..chat.conversation import conversation
from ..chat.ends import turn_end
from ..data.columns import Array
from ..data.segment import LeafStatus, Origin, Segment
from ..data.tree import TokenTree
from ..errors import UserError
from ..settings import DataConfig, DemonstrationsConfig
from ..tasks import Problem, read_tables
from .prompts import Prompt, make_prompts, pictures_of, question
from .sources import PromptSource


class Demonstrations:
    """The tables of given responses, each in an order that follows from ``seed``, some of them for every update.

    A response is a branch of given tokens, which are no part of a policy loss, only of terms that select them; in a
    conversation the messages between those of the assistant are no part of any. The tree of a pair has two branches,
    the better one first. ``meta["demonstrations"]`` is the name of the table.

    Attributes:
        prompts: `question` of each.

    Raises:
        UserError: a file cannot be used.
    """

    def __init__(
        self,
        tables: Sequence[DemonstrationsConfig],
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
    ) -> None:
        readers = [_Reader(config, data, tokenizer) for config in tables]
        self.prompts = {question(problem) for reader in readers for problem in reader.problems}
        self._tables = [
            _Table(reader.config, [seed] if index == 0 else [seed, index], reader.trees())
            for index, reader in enumerate(readers)
        ]

    def next(self) -> list[TokenTree]:
        """Return the next ``per_step`` demonstrations of each table; a file is shuffled anew for each pass over it."""
        return [tree for table in self._tables for tree in table.next()]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt with its response; 0 without demonstrations."""
        lengths = [int(tree.path_length.max()) for table in self._tables for tree in table.trees]
        return max(lengths, default=0)

    def overlap(self, data: DataConfig, source: PromptSource, held_out: Sequence[Prompt]) -> str:
        """Return a sentence about the problems of the run that have a prompt of a demonstration."""
        files = dict.fromkeys(str(table.config.place) for table in self._tables)
        shared, where = source.demonstrated, f"the text of a prompt in {', '.join(files)} (demonstrations.path)"
        solved = sum(question(prompt) in self.prompts for prompt in held_out)
        of_held_out = f"{solved} of {len(held_out)} held-out problems"
        if shared is None:
            left = "; those that come are left out (data.disjoint)" if data.disjoint else ""
            return f"{of_held_out} have {where}; how many training problems have is not known before they come{left}"
        count = len(source.known) + (shared if data.disjoint else 0)
        said = f"{shared} of {count} training problems and {of_held_out} have {where}"
        if data.disjoint:
            return f"{said}; data.disjoint leaves out the {shared} of training"
        return f"{said}; set data.disjoint to true to leave out the {shared} of training" if shared else said

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor of each table and a digest of its tokens."""
        return {table.config.name: table.state_dict() for table in self._tables}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue saved streams.

        Raises:
            UserError: a file has other rows now.
        """
        for table in self._tables:
            table.load_state_dict(state[table.config.name])


@dataclass
class _Table:
    """The stream of one table; ``cursor`` counts what it has returned."""

    config: DemonstrationsConfig
    seeds: list[int]
    trees: list[TokenTree]
    cursor: int = 0
    order: tuple[int, list[int]] = (-1, [])  # a pass over the file, and its order

    def next(self) -> list[TokenTree]:
        chosen = []
        for _ in range(self.config.per_step):
            turn, index = divmod(self.cursor, len(self.trees))
            if self.order[0] != turn:
                self.order = turn, np.random.default_rng([*self.seeds, turn]).permutation(len(self.trees)).tolist()
            tree = self.trees[self.order[1][index]]
            chosen.append(replace(tree, columns=dict(tree.columns), meta=dict(tree.meta)))
            self.cursor += 1
        return chosen

    def state_dict(self) -> dict[str, Any]:
        digest = hashlib.blake2b(digest_size=16)
        for tree in self.trees:
            digest.update(tree.token_id.tobytes() + b"/")
        return {"cursor": self.cursor, "digest": digest.hexdigest()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["digest"] != self.state_dict()["digest"]:
            raise UserError(
                f"The checkpoint was made with other rows than {self.config.place} (demonstrations.path) has now; "
                "restore them or start a run under another --name."
            )
        self.cursor = state["cursor"]


class _Reader:
    """Makes the trees of a table."""

    def __init__(self, config: DemonstrationsConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config, self.data, self.tokenizer = config, data, tokenizer
        end = turn_end(tokenizer, chat=data.chat)
        assert end is not None  # loading refuses a tokenizer without one
        self.end = end
        self.problems = self._read()

    def trees(self) -> list[TokenTree]:
        return [self._tree(problem, problem.entry["answer"]) for problem in self.problems]

    def _read(self) -> list[Problem]:
        keys = self.config.prompt_key, self.config.response_key, self.data.image_key
        options = "demonstrations.prompt_key", "demonstrations.response_key"
        problems = []
        for table in read_tables(self.config.place):
            for n, row in enumerate(table.rows):
                if self.config.messages_key is not None:
                    row = self._cut(row, f"Row {n} of {table.where}")
                problems.append(table.problem(n, row, *keys, options=options))
        return problems

    def _cut(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """Return a row with the prompt and the response of its whole conversation."""
        messages = row.get(str(self.config.messages_key))
        talk = messages if isinstance(messages, list) else []
        roles = [m.get("role") if isinstance(m, dict) else None for m in talk]
        if "assistant" not in roles[1:]:
            raise UserError(
                f"{where} needs a list of messages in column '{self.config.messages_key}' (demonstrations."
                "messages_key), one of the assistant among them, and others before it."
            )
        first = roles.index("assistant")
        return row | {self.config.prompt_key: talk[:first], self.config.response_key: talk[first:]}

    def _tree(self, problem: Problem, answer: Any) -> TokenTree:
        (prompt,) = make_prompts([problem], self.data, self.tokenizer)
        answers: dict[str, Any] = {"messages_key" if self.config.messages_key else "response_key": answer}
        if self.config.rejected_key is not None:
            answers["rejected_key"] = problem.entry.get(self.config.rejected_key)
        segments, parents, ends = [Segment.prompt(prompt.token_ids)], [-1], []
        for key, one in answers.items():
            above = 0
            for segment in self._response(problem, prompt, one, key):
                segments.append(segment)
                parents.append(above)
                above = len(segments) - 1
            ends.append(above)
        pictures = pictures_of(prompt, self.tokenizer)
        tree = TokenTree.from_nodes(parents, segments, ends, [LeafStatus.STOP] * len(ends), pictures=pictures)
        rows = tree.response_rows(0)
        injected = rows[tree.origin[rows] == Origin.INJECTED]
        for of, column, name in (
            (self.config.logprob_key, "behaviour_logprob", "logprob_key"),
            (self.config.weight_key, "demonstration_weight", "weight_key"),
        ):
            if of is not None:
                values = np.full(tree.num_tokens, np.nan if column == "behaviour_logprob" else 1.0, np.float32)
                values[injected] = self._numbers(problem, of, name, len(injected))
                tree.set(column, values)
        tree.meta["demonstrations"] = self.config.name
        return tree

    def _response(self, problem: Problem, prompt: Prompt, answer: Any, key: str) -> list[Segment]:
        """Return the segments of a response, which column ``key`` of the configuration has: those of the assistant are
        given, those between are observations."""
        if isinstance(answer, str | int | float):
            return [self._given(str(answer))]
        messages = self._checked(problem, answer, key)
        if not prompt.messages:
            raise UserError(
                f"The demonstration '{problem.id}' is a conversation, which the chat template writes; set data.chat."
            )
        segments, said = [self._given(messages[0]["content"])], [*prompt.messages, messages[0]]
        talk = conversation(self.tokenizer, [], [self.end])
        places = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        try:
            written = talk.begin(prompt.messages)
            for last, turn in pairwise(places):
                ids, written = talk.grow(said, written, messages[last + 1 : turn], self.end)
                segments += [Segment.make(ids, origin=Origin.OBSERVATION), self._given(messages[turn]["content"])]
                said += messages[last + 1 : turn + 1]
        except ValueError as error:
            raise UserError(f"The demonstration '{problem.id}' cannot be written: {str(error).rstrip('.')}.") from error
        return segments

    def _given(self, text: str) -> Segment:
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.end]
        return Segment.make(ids, origin=Origin.INJECTED)

    def _checked(self, problem: Problem, answer: Any, key: str) -> list[dict[str, Any]]:
        """Return the messages of a response.

        Raises:
            UserError: they are no conversation that begins and ends with a text of the assistant, between whose
                messages are others.
        """
        messages = answer if isinstance(answer, list) else []
        plain = all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages)
        roles = [m.get("role") for m in messages] if plain else []
        twice = ("assistant", "assistant") in pairwise(roles)
        if not roles or roles[0] != "assistant" or roles[-1] != "assistant" or twice:
            raise UserError(
                f"The demonstration '{problem.id}' needs a response (demonstrations.{key}) that is a text, or a list "
                "of messages with texts as contents that begins and ends with one of the assistant and has others "
                "between two of them."
            )
        if any(m.get("tool_calls") for m in messages):
            raise UserError(
                f"The demonstration '{problem.id}' has a message with `tool_calls`; write the call into its text as "
                "the model is to write it."
            )
        return [{"role": m["role"], "content": m["content"]} for m in messages]

    def _numbers(self, problem: Problem, key: str, name: str, count: int) -> Array:  # [count], or one for all
        weights = name == "weight_key"
        cell = problem.entry.get(key)
        try:
            numbers = np.asarray(cell, np.float64)
        except (TypeError, ValueError):
            numbers = np.zeros(0)
        fits = numbers.shape == (count,) or (weights and numbers.shape == ())
        in_range = (numbers >= 0 if weights else numbers <= 0).all()
        if not (fits and np.isfinite(numbers).all() and in_range):
            what = "weights (finite, at least 0; or one weight)" if weights else "log-probs (finite, at most 0)"
            raise UserError(
                f"The demonstration '{problem.id}' needs {count} {what} in the column '{key}' (demonstrations.{name}), "
                f"one for each token of its response and for the end token; it has "
                f"{numbers.size if numbers.ndim == 1 else 'other values'}."
            )
        return numbers
