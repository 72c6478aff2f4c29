"""Given responses that a run trains on together with its rollouts: `[demonstrations]`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..data.columns import Array
from ..data.segment import LeafStatus, Origin, Segment
from ..data.tree import TokenTree
from ..errors import UserError
from ..settings import DataConfig, DemonstrationsConfig
from ..tasks import Problem, read_problems
from .prompts import Prompt, make_prompts, pictures_of, question
from .sources import PromptSource


class Demonstrations:
    """Given responses, in an order that follows from ``seed``, some of them for every update.

    Their tokens are injected: they are no part of a policy loss, only of terms that select them.

    Attributes:
        prompts: `question` of each.

    Raises:
        UserError: the file cannot be used.
    """

    def __init__(
        self, config: DemonstrationsConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int
    ) -> None:
        self.config, self.seed, self.cursor = config, seed, 0
        self._order: tuple[int, list[int]] = (-1, [])  # a pass over the file, and its order
        problems = read_problems(
            config.path, "demonstrations.path", config.prompt_key, config.response_key, data.image_key
        )
        self._trees = [self._tree(problem, data, tokenizer) for problem in problems]
        self.prompts = {question(problem) for problem in problems}

    def next(self) -> list[TokenTree]:
        """Return the next ``per_step`` demonstrations; the file is shuffled anew for each pass over it."""
        chosen = []
        for _ in range(self.config.per_step):
            turn, index = divmod(self.cursor, len(self._trees))
            if self._order[0] != turn:
                self._order = turn, np.random.default_rng([self.seed, turn]).permutation(len(self._trees)).tolist()
            tree = self._trees[self._order[1][index]]
            chosen.append(replace(tree, columns=dict(tree.columns), meta=dict(tree.meta)))
            self.cursor += 1
        return chosen

    def overlap(self, data: DataConfig, source: PromptSource, held_out: Sequence[Prompt]) -> str:
        """Return a sentence about the problems of the run that have a prompt of a demonstration."""
        shared, where = source.demonstrated, f"the text of a prompt in '{self.config.path}' (demonstrations.path)"
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
        """Return the cursor and a digest of the tokens."""
        found = hashlib.blake2b(digest_size=16)
        for tree in self._trees:
            found.update(tree.token_id.tobytes() + b"/")
        return {"cursor": self.cursor, "digest": found.hexdigest()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a saved stream.

        Raises:
            UserError: the file has other rows now.
        """
        if state["digest"] != self.state_dict()["digest"]:
            raise UserError(
                f"The checkpoint was made with other rows than '{self.config.path}' (demonstrations.path) has now; "
                "restore the file or start a run under another --name."
            )
        self.cursor = state["cursor"]

    def _tree(self, problem: Problem, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> TokenTree:
        (prompt,) = make_prompts([problem], data, tokenizer)
        answer = str(problem.entry["answer"])
        ids = [*tokenizer(answer, add_special_tokens=False)["input_ids"], int(tokenizer.eos_token_id)]
        known = {} if self.config.logprob_key is None else {"behaviour_logprob": self._logprobs(problem, len(ids))}
        return TokenTree.from_nodes(
            [-1, 0],
            [Segment.prompt(prompt.token_ids), Segment.make(ids, origin=Origin.INJECTED, **known)],
            [1],
            [LeafStatus.STOP],
            pictures=pictures_of(prompt, tokenizer),
        )

    def _logprobs(self, problem: Problem, count: int) -> Array:  # [count]
        key = self.config.logprob_key
        assert key is not None
        given = problem.entry.get(key)
        try:
            found = np.asarray(given, np.float64)
        except (TypeError, ValueError):
            found = np.zeros(0)
        if found.shape != (count,) or not (np.isfinite(found).all() and (found <= 0).all()):
            raise UserError(
                f"The demonstration '{problem.id}' needs {count} log-probs (finite, at most 0) in the column '{key}' "
                f"(demonstrations.logprob_key), one for each token of its response and for the end token; it has "
                f"{found.size if found.ndim == 1 else 'other values'}."
            )
        return found
