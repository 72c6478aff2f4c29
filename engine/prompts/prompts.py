"""Problems in the template of the run, as token ids with their pictures; the held-out ones of the evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..chat.writing import complete, plain
from ..data.media import Picture, distinct, expand
from ..errors import UserError
from ..model.processor import processor_beside
from ..programs.chat.toolbox import Tool, tool_schemas
from ..settings import DataConfig, Place
from ..tasks import GymProblems, Problem, Problems, read_problems
from ..tasks.images import Image, content_of
from ..tasks.problems import Read

TRAIN, HELD_OUT = 0, 1
"""Seeds of the streams of generated problems."""
GIVE_UP = 10_000
"""Number of held-out or refused problems in a row after which the source is assumed to have no others."""


@dataclass(frozen=True)
class Prompt:
    """A problem in its template, as token ids."""

    id: str
    task: str
    text: str
    """The problem in its template."""
    token_ids: list[int]
    entry: dict[str, Any]
    """Columns of the problem's row, which the verifier gets with the response."""
    problem: str
    """The problem without template."""
    n: int | None = None
    """Number of responses; None: `rollout.n`."""
    messages: tuple[dict[str, Any], ...] = ()
    """The conversation that ``text`` contains; empty without `data.chat`."""
    tools: tuple[Tool, ...] = ()
    """Tools that the conversation offers: `data.tools`."""
    images: tuple[Image, ...] = ()
    """Its pictures as the data has them; ``token_ids`` hold the ids of their rows."""
    identity: str = ""
    """`Problem.identity`."""

    @property
    def context(self) -> dict[str, Any]:
        """The rollout program's input: the entry, and the conversation if there is one."""
        return self.entry | ({"messages": self.messages, "tools": self.tools} if self.messages else {})


def question(problem: Problem | Prompt) -> str:
    """Return a key that is equal for equal problems of different files: the text without template and without blanks at
    its ends, and a hash of the pictures if there are any."""
    text = problem.problem if isinstance(problem, Prompt) else problem.text
    return text.strip() + problem.identity[len(text) :]


def held_out(data: DataConfig, count: int, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return ``count`` different problems for the evaluation, the same for every seed of the run.

    Raises:
        UserError: the file has too few rows, or the tasks too few different problems.
    """
    if count == 0:
        return []
    problems: dict[str, Problem] = {}
    if data.tasks:
        stream = GymProblems(data.tasks, [HELD_OUT])
        for k in range(count + GIVE_UP):
            problem = stream[k]
            problems.setdefault(problem.identity, problem)
            if len(problems) == count:
                break
    else:
        eval_place = data.eval_place
        place = eval_place or data.place
        assert place is not None
        for problem in _in_turn(read_rows(data, place).rows, data, tokenizer):  # the first of equal problems is kept
            problems.setdefault(problem.identity, problem)
            if len(problems) == count:
                break
        if eval_place is None:
            problems = dict(reversed(problems.items()))
    if len(problems) < count:
        raise UserError(
            f"evaluation.problems is {count}, but only {len(problems)} different problems were found; lower it or add "
            "some."
        )
    one_answer_each = data.model_copy(update={"n_key": None})
    return make_prompts(list(problems.values()), one_answer_each, tokenizer)


def _in_turn(problems: Problems, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Problem]:
    """Yield the problems to hold out: those of a place of their own, or the last ones, without such that
    `data.on_bad_row` skips when they are met in training."""
    if data.eval_place is not None:
        yield from (problems[number] for number in range(len(problems)))
        return
    for number in reversed(range(len(problems))):
        try:
            problem = problems[number]
            if data.on_bad_row == "skip":
                make_prompts([problem], data.model_copy(update={"n_key": None}), tokenizer)
        except UserError:
            if data.on_bad_row == "raise":
                raise
            continue
        yield problem


def make_prompts(problems: Sequence[Problem], config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return the problems in their template, as token ids.

    Raises:
        UserError: a prompt is longer than `data.max_prompt_tokens`, has no tokens, or lacks the number of responses in
            the column `data.n_key`.
    """
    if not problems:
        return []
    written = [_write(problem, config, tokenizer) for problem in problems]
    texts = [_framed(problem, text, tokenizer) for problem, (text, _) in zip(problems, written, strict=True)]
    encoded = tokenizer(texts, add_special_tokens=not config.chat)["input_ids"]
    prompts = []
    for problem, (text, messages), ids in zip(problems, written, encoded, strict=True):
        if problem.images:
            ids = _with_pictures(problem, list(ids), tokenizer)
        if len(ids) > config.max_prompt_tokens:
            raise UserError(
                f"The prompt '{problem.id}' is {len(ids)} tokens long, over data.max_prompt_tokens = "
                f"{config.max_prompt_tokens}; raise it or leave the prompt out."
            )
        if not ids:
            raise UserError(f"The prompt '{problem.id}' has no tokens; leave it out or give it a data.template.")
        responses = _wanted(problem, config)
        prompts.append(
            Prompt(
                problem.id,
                problem.task,
                text,
                list(ids),
                problem.entry,
                problem.text,
                responses,
                messages,
                config.tools,
                problem.images,
                problem.identity,
            )
        )
    return prompts


def _framed(problem: Problem, text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text with the tokens that the model expects around its pictures."""
    return processor_beside(tokenizer).framed(text, tokenizer) if problem.images else text


def _with_pictures(problem: Problem, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return a prompt's token ids with those of its pictures' rows in place of their placeholders.

    Raises:
        UserError: a picture cannot be read, or the prompt has another number of placeholders.
    """
    try:
        return expand(ids, _pictures(problem.images, tokenizer), processor_beside(tokenizer).placeholder)
    except (OSError, ValueError) as error:
        raise UserError(
            f"The pictures of the prompt '{problem.id}' cannot be used: {str(error).rstrip('.')}."
        ) from error


def _pictures(images: Sequence[Image], tokenizer: PreTrainedTokenizerBase) -> list[Picture]:
    processor = processor_beside(tokenizer)
    return [processor.picture(content_of(image)) for image in images]


def pictures_of(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> tuple[Picture, ...]:
    """Return the pictures of a prompt as the model takes them; the pixels are made anew while nothing else holds them.

    Raises:
        UserError: a file has changed since the prompt was made, or cannot be read any more.
    """
    if not prompt.images:
        return ()
    try:
        pictures = _pictures(prompt.images, tokenizer)
    except (OSError, ValueError) as error:
        raise UserError(
            f"The pictures of the prompt '{prompt.id}' cannot be read: {str(error).rstrip('.')}."
        ) from error
    if not {picture.first_id for picture in pictures} <= set(prompt.token_ids):
        raise UserError(
            f"A picture of the prompt '{prompt.id}' has changed since the prompt was made; restore its file."
        )
    return distinct(pictures)


def _write(
    problem: Problem, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[str, tuple[dict[str, Any], ...]]:
    """Return the text that the model gets for a problem, and its messages if it is a chat."""
    text = config.template.replace("{prompt}", problem.text)
    if problem.messages and (not config.chat or config.template != "{prompt}"):
        raise UserError(
            f"The prompt '{problem.id}' is a conversation, which the tokenizer's chat template writes; set data.chat "
            "to true and leave data.template out."
        )
    if not config.chat:
        return text, ()
    messages = problem.messages
    if not messages:
        words: Any = text
        if problem.images:
            words = [*({"type": "image"} for _ in problem.images), {"type": "text", "text": text}]
        messages = ({"role": "user", "content": words},)
    if tokenizer.chat_template is None:
        raise UserError(
            "data.chat is set but the tokenizer has no chat template; set it to false and use data.template."
        )
    tools = tool_schemas(config.tools) or None
    try:
        written = complete(tokenizer, plain(messages), tools)
    except ValueError as error:
        raise UserError(
            f"The tokenizer's chat template cannot write the prompt '{problem.id}': {str(error).rstrip('.')}."
        ) from error
    return written.text, tuple(written.messages)


def _wanted(problem: Problem, config: DataConfig) -> int | None:
    """Return the number of responses in the column `data.n_key`; None without such a column."""
    if config.n_key is None:
        return None
    n = problem.entry.get(config.n_key)
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n < 2**31:
        raise UserError(
            f"The prompt '{problem.id}' has {n!r} in column '{config.n_key}' (data.n_key); give an integer of at "
            "least 1, the number of its responses."
        )
    return n


def read_rows(config: DataConfig, place: Place) -> Read:
    """Return the problems of a place, from the columns that the configuration names."""
    skip = config.on_bad_row == "skip"
    return read_problems(place, config.prompt_key, config.answer_key, config.image_key, skip=skip)
