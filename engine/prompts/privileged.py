"""Prompts that a teacher reads in place of the policy's: the problem with what the policy is not told."""

from __future__ import annotations

import re

from ..data.tree import TokenTree
from ..errors import UserError
from ..parts.context import Context
from ..settings import DataConfig
from ..tasks import Problem
from .prompts import make_prompts

PLACE = re.compile(r"\{(\w+)\}")


class PrivilegedPrompt:
    """Returns the token ids of the prompt that the teacher reads for a tree: a template with columns of its problem.

    Args:
        template: ``{prompt}`` is the problem, and any other name in braces a column of its row; the result takes the
            place of the problem in the run's `data.template` or chat.
        data: how the run's prompts are written.
        longest: largest number of tokens.
        context: knows the tokenizer and the rows.
    """

    def __init__(self, template: str, data: DataConfig, longest: int, context: Context) -> None:
        self.template, self.context = template, context
        self._data = data.model_copy(update={"max_prompt_tokens": longest, "n_key": None})

    def __call__(self, tree: TokenTree) -> list[int]:
        """Return the ids ``[n]``.

        Raises:
            UserError: the row of the tree's problem lacks a column of the template, or the prompt is too long.
            NotReadyError: the tree is made up and has no row.
        """
        of_run = self.context.values(("tokenizer", "entry"), tree)
        columns = of_run["entry"] | {"prompt": tree.meta["problem"]}

        def filled(place: re.Match[str]) -> str:
            if place[1] not in columns:
                raise UserError(
                    f"roles.teacher.context names {{{place[1]}}}, a column that the problem '{tree.meta['prompt_id']}' "
                    "does not have; add it to the data, or change the template."
                )
            return str(columns[place[1]])

        text = PLACE.sub(filled, self.template)
        problem = Problem(tree.meta["prompt_id"], tree.meta["task"], text, of_run["entry"])
        (prompt,) = make_prompts([problem], self._data, of_run["tokenizer"])
        return prompt.token_ids
