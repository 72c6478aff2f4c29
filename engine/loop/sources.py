"""Prompts of a run: a stream with a cursor that a checkpoint stores, and held-out problems that it never returns."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from ..data.columns import Array
from ..data.media import Picture, distinct, expand
from ..data.segment import LeafStatus, Origin, Segment
from ..data.tree import TokenTree
from ..errors import UserError
from ..model.processor import processor_beside
from ..parts.calling import call
from ..parts.resolve import resolve
from ..programs.chat import tool_schema
from ..settings import DataConfig, DemonstrationsConfig
from ..tasks import Games, GymProblems, Problem, problem_of, read_problems
from ..tasks.images import Image, content_of
from ..tasks.verifiers import TasksetPrompts
from .curriculum import Curriculum

if TYPE_CHECKING:
    from .buffer import Group

TRAIN, HELD_OUT = 0, 1
"""Seeds of the streams of generated problems."""
SOURCES = {"games": Games, "verifiers": TasksetPrompts}
"""Classes that `data.source` may name."""
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
    tools: tuple[str, ...] = ()
    """Tools that the conversation offers: `data.tools`."""
    images: tuple[Image, ...] = ()
    """Its pictures as the data has them; ``token_ids`` hold the ids of their rows."""
    identity: str = ""
    """`Problem.identity`."""

    @property
    def context(self) -> dict[str, Any]:
        """The rollout program's input: the entry, and the conversation if there is one."""
        return self.entry | ({"messages": self.messages, "tools": self.tools} if self.messages else {})


class PromptSource:
    """Training prompts in an order that follows from ``seed``; a file is shuffled anew for each pass over it.

    A curriculum may pass over prompts or choose their order; then that follows from the groups observed before too.

    Args:
        held_out: prompts whose problems are never returned.
        entries: called with a row and its description, returns what checkpoints can store of it; None if they store
            no rows.

    Raises:
        UserError: the tasks or the file cannot be used, a row is too long, or all rows are held out.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        held_out: Sequence[Prompt] = (),
        entries: Callable[[Mapping[str, Any], str], dict[str, Any]] | None = None,
    ) -> None:
        self._config = config
        self._held_out = held_out
        self._entries = entries
        self._tokenizer = tokenizer
        self._seed = seed
        self._excluded = {prompt.identity for prompt in held_out}
        self._cursor = 0
        self._order: tuple[int, list[int]] = (-1, [])  # a pass over the file, and its order
        self._rows: list[Prompt] = []
        self._stream: Any = None
        self.curriculum = None if config.curriculum is None else Curriculum(config)
        self._taken: Counter[str] = Counter()  # rows chosen so far, by id; kept for a curriculum
        self._numbers = [0] * len(config.tasks)  # of the problems that a curriculum chooses from: the next of each task
        self._waiting: list[dict[int, Problem]] = [{} for _ in config.tasks]  # those before it that were not chosen
        if config.source is not None:
            self._stream = UserProblems(config)
        elif config.path is None:
            self._stream = GymProblems(config.tasks, [TRAIN, seed])
        else:
            problems = _read(config, config.path, "data.path")
            # all rows are checked now, so that one that is too long does not end a run after hours
            prompts = make_prompts(problems, config, tokenizer)
            self._rows = self._fit([prompt for prompt in prompts if prompt.identity not in self._excluded])
            if not self._rows:
                raise UserError(
                    f"All problems of '{config.path}' (data.path) are held out; lower evaluation.problems or add rows."
                )

    def next(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts.

        Raises:
            UserError: a prompt is longer than `data.max_prompt_tokens`, or every generated problem is held out.
        """
        if self.curriculum is not None and self.curriculum.orders:
            prompts = self._chosen(count)
        elif self._rows:
            prompts = self._next_rows(count)
        else:
            prompts = self._next_problems(count)
        if self.curriculum is not None:
            prompts = [self.curriculum.sized(prompt, self._taken) for prompt in prompts]
        return prompts

    def _next_rows(self, count: int) -> list[Prompt]:
        if self.curriculum is None:
            self._cursor += count
            return [self._row(turn) for turn in range(self._cursor - count, self._cursor)]
        prompts: list[Prompt] = []
        refused = 0
        while len(prompts) < count:
            prompt = self._row(self._cursor)
            self._cursor += 1
            if self.curriculum.accepts(prompt, self._taken):
                prompts.append(prompt)
                self._taken[prompt.id] += 1
                refused = 0
            elif (refused := refused + 1) >= len(self._rows):
                raise self._all_refused()
        return prompts

    def _next_problems(self, count: int) -> list[Prompt]:
        problems: list[Problem] = []
        skipped = 0
        while len(problems) < count:
            problem = self._stream[self._cursor]
            self._cursor += 1
            if problem.identity in self._excluded:
                skipped += 1
                if skipped > GIVE_UP:
                    what = "source" if self._config.source is not None else "tasks"
                    raise UserError(
                        f"data.{what} generates no problems that are not held out; make them harder or lower "
                        "evaluation.problems."
                    )
                continue
            if self.curriculum is not None and not self.curriculum.accepts(problem, self._taken):
                if (skipped := skipped + 1) > GIVE_UP:
                    raise self._all_refused()
                continue
            skipped = 0
            problems.append(problem)
        return self._fit(make_prompts(problems, self._config, self._tokenizer))

    def _chosen(self, count: int) -> list[Prompt]:
        """Return the prompts that the curriculum's order begins with; it is asked again if its order is too short."""
        assert self.curriculum is not None
        prompts: list[Prompt] = []
        while len(prompts) < count:
            before = len(prompts)
            pool = self._pool(count - before)
            for found in self.curriculum.order(pool.values(), self._taken, [self._seed, self._cursor]):
                problem = pool[found]
                accepted = self.curriculum.accepts(problem, self._taken)
                if isinstance(problem, Prompt):
                    self._taken[found] += accepted
                    prompts += [problem] * accepted
                else:
                    for waiting in self._waiting:
                        waiting.pop(int(found.rpartition("/")[2]), None)
                    prompts += self._fit(make_prompts([problem] * accepted, self._config, self._tokenizer))
                self._cursor += accepted
                if len(prompts) == count:
                    break
            if len(prompts) == before:
                raise self._all_refused()
        return prompts

    def _pool(self, count: int) -> Mapping[str, Prompt | Problem]:
        """Return the rows, those chosen least often first, or the next ``count`` problems of each task."""
        if self._rows:
            taken = [self._taken[row.id] for row in self._rows]
            place = {turn: np.argsort(self._shuffled(turn)).tolist() for turn in set(taken)}
            order = sorted(range(len(taken)), key=lambda i: (taken[i], place[taken[i]][i]))
            return {self._rows[i].id: self._rows[i] for i in order}
        for index, waiting in enumerate(self._waiting):
            for _ in range(GIVE_UP):
                if len(waiting) >= count:
                    break
                # a number belongs to one task, as two tasks may have one name and ids have both
                number = self._numbers[index] * len(self._waiting) + index
                self._numbers[index] += 1
                problem = self._stream.of_task(index, number)
                if problem.identity not in self._excluded:
                    waiting[number] = problem
        first = [list(waiting.values())[:count] for waiting in self._waiting]
        return {problem.id: problem for problems in first for problem in problems}

    def _all_refused(self) -> UserError:
        assert self.curriculum is not None
        return UserError(f"{self.curriculum.what} chooses no prompt any more; widen its options or add problems.")

    def peek(self, count: int) -> list[Prompt]:
        """Return the prompts that `next` will return, without advancing the cursor."""
        kept = self._cursor, self._taken.copy(), list(self._numbers), [dict(waiting) for waiting in self._waiting]
        try:
            return self.next(count)
        finally:
            self._cursor, self._taken, self._numbers, self._waiting = kept

    def prompt(self, problem: Problem) -> Prompt:
        """Return ``problem`` in the run's template.

        Raises:
            UserError: as `next`.
        """
        (prompt,) = make_prompts([problem], self._config, self._tokenizer)
        return prompt

    @property
    def known(self) -> Sequence[Prompt]:
        """The prompts of a file; empty if problems are generated."""
        return self._rows

    @property
    def observes(self) -> bool:
        """True if `observe` has an effect."""
        return self.curriculum is not None or (isinstance(self._stream, UserProblems) and self._stream.observes)

    def observe(self, groups: Sequence[Group]) -> None:
        """Pass the groups of an ended step to the curriculum or the user's source, if it has a method ``observe``."""
        if self.curriculum is not None:
            for group in groups:
                self.curriculum.observe(group, self._taken)
        if isinstance(self._stream, UserProblems):
            self._stream.observe([group.tree for group in groups])

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor and digests of the files, for an `Archive`."""
        state: dict[str, Any] = {"cursor": self._cursor, "rows": len(self._rows), "digests": self._digests}
        if isinstance(self._stream, UserProblems):
            state["source"] = self._stream.state_dict(self._cursor)
        if self.curriculum is not None:
            state |= {"taken": self._taken, "numbers": self._numbers, "waiting": [list(w) for w in self._waiting]}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a saved stream.

        Raises:
            UserError: the file has other rows now.
        """
        if state["rows"] != len(self._rows):
            raise UserError(
                f"The checkpoint was made with {state['rows']} training rows in '{self._config.path}' (data.path) and "
                f"there are {len(self._rows)} now; restore the file or start a run under another --name."
            )
        for what, old, new in zip(("training", "held-out"), state["digests"], self._digests, strict=True):
            if old != new:
                path = self._config.eval_path if what == "held-out" and self._config.eval_path else self._config.path
                raise UserError(
                    f"The checkpoint was made with other {what} rows than '{path}' has now, though as many; restore "
                    "the file or start a run under another --name."
                )
        self._cursor = state["cursor"]
        if self.curriculum is not None:
            self._taken, self._numbers = state["taken"], state["numbers"]
            self._waiting = [
                {number: self._stream.of_task(index, number) for number in numbers}
                for index, numbers in enumerate(state["waiting"])
            ]
        if isinstance(self._stream, UserProblems):
            self._stream.load_state_dict(state["source"])

    @cached_property
    def _digests(self) -> tuple[str, str]:
        """Digests of the training and held-out rows; generated problems follow from the configuration."""
        return _digest(self._rows), _digest(() if self._config.tasks else self._held_out)

    def _fit(self, prompts: list[Prompt]) -> list[Prompt]:
        """Return the prompts with entries that checkpoints can store."""
        if self._entries is None:
            return prompts
        return [replace(p, entry=self._entries(p.entry, f"The prompt '{p.id}'")) for p in prompts]

    def _row(self, cursor: int) -> Prompt:
        turn, index = divmod(cursor, len(self._rows))
        if self._order[0] != turn:
            self._order = (turn, self._shuffled(turn))
        return self._rows[self._order[1][index]]

    def _shuffled(self, turn: int) -> list[int]:
        """Return the indices of the rows in the order of a pass over the file."""
        order: list[int] = np.random.default_rng([self._seed, turn]).permutation(len(self._rows)).tolist()
        return order


class UserProblems:
    """Problems of the class that `data.source` names, by their number; each is requested once, in order.

    ``next(count)`` returns that many rows with the columns `data.prompt_key` and `data.answer_key`. ``observe(trees)``
    is optional and gets the groups of each ended step with their credit: those that were trained on, and those that
    were dropped after judging, whose ``meta["dropped"]`` is the reason. ``state_dict()`` and ``load_state_dict(state)``
    are optional and exchange plain values with a checkpoint; without them, a resumed run calls ``next`` for the rows
    that were used before.

    Raises:
        UserError: the class does not exist, or one of its methods raises or returns something else.
    """

    def __init__(self, config: DataConfig) -> None:
        assert config.source is not None
        self._what = f"data.source = '{config.source}'"
        self._config = config
        self._own = resolve("data.source", config.source, config.source_options, known=SOURCES)
        if not callable(getattr(self._own, "next", None)):
            raise UserError(f"{self._what} must be a class with a method next(count).")
        self._ready: dict[int, dict[str, Any]] = {}  # rows by number, also those requested ahead
        self._asked = 0
        self._from = 0  # first row that a checkpoint may need

    def __getitem__(self, number: int) -> Problem:
        while self._asked <= number:
            rows = call(self._what, self._own.next, 1)
            if not isinstance(rows, list) or len(rows) != 1 or not isinstance(rows[0], dict):
                raise UserError(f"{self._what}: next(1) must answer a list of one row, a dict.")
            self._ready[self._asked] = rows[0]
            self._asked += 1
        keys = self._config.prompt_key, self._config.answer_key, self._config.image_key
        return problem_of(self._ready[number], self._what, "source", number, *keys)

    @property
    def observes(self) -> bool:
        return hasattr(self._own, "observe")

    def observe(self, trees: Sequence[TokenTree]) -> None:
        """Pass trees to the class, if it has a method ``observe``."""
        if self.observes:
            call(self._what, self._own.observe, trees)

    def state_dict(self, cursor: int) -> dict[str, Any]:
        """Return the state to continue from problem ``cursor``; earlier rows are dropped."""
        self._ready = {number: row for number, row in self._ready.items() if number >= self._from}
        self._from = cursor  # dropped at the next call: the checkpoint that this is for may fail
        ready = [[number, row] for number, row in self._ready.items() if number >= cursor]
        own = call(self._what, self._own.state_dict) if hasattr(self._own, "state_dict") else None
        return {"own": own, "asked": self._asked, "ready": ready}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`; without a state of its own the class gives the rows after it only once,
        so a run that goes back in place keeps those that it has."""
        asked, ready = state["asked"], dict(map(tuple, state["ready"]))
        if hasattr(self._own, "load_state_dict"):
            call(self._what, self._own.load_state_dict, state["own"])
        elif self._asked < asked:
            call(self._what, self._own.next, asked - self._asked)
        elif self._asked > asked:
            asked, ready = self._asked, ready | self._ready
        self._asked, self._ready, self._from = asked, ready, 0


class Demonstrations:
    """Given responses, in an order that follows from ``seed``, some of them for every update.

    Their tokens are injected: they are no part of a policy loss, only of terms that select them.

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


def held_out(data: DataConfig, wanted: int, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return ``wanted`` different problems for the evaluation, the same for every seed of the run.

    Raises:
        UserError: the file has too few rows, or the tasks too few different problems.
    """
    if wanted == 0:
        return []
    found: dict[str, Problem] = {}
    if data.tasks:
        stream = GymProblems(data.tasks, [HELD_OUT])
        for k in range(wanted + GIVE_UP):
            problem = stream[k]
            found.setdefault(problem.identity, problem)
            if len(found) == wanted:
                break
    else:
        key = "data.path" if data.eval_path is None else "data.eval_path"
        file = data.eval_path or data.path
        assert file is not None
        rows = _read(data, file, key)
        for problem in rows if data.eval_path is not None else reversed(rows):  # the first of equal problems is kept
            found.setdefault(problem.identity, problem)
            if len(found) == wanted:
                break
        if data.eval_path is None:
            found = dict(reversed(found.items()))
    if len(found) < wanted:
        raise UserError(
            f"evaluation.problems is {wanted}, but only {len(found)} different problems were found; lower it or add "
            "some."
        )
    one_answer_each = data.model_copy(update={"n_key": None})
    return make_prompts(list(found.values()), one_answer_each, tokenizer)


def make_prompts(problems: Sequence[Problem], config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return the problems in their template, as token ids.

    Raises:
        UserError: a prompt is longer than `data.max_prompt_tokens`, has no tokens, or lacks the number of responses in
            the column `data.n_key`.
    """
    if not problems:
        return []
    written = [_write(problem, config, tokenizer) for problem in problems]
    encoded = tokenizer([text for text, _ in written], add_special_tokens=not config.chat)["input_ids"]
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
        wanted = _wanted(problem, config)
        prompts.append(
            Prompt(
                problem.id,
                problem.task,
                text,
                list(ids),
                problem.entry,
                problem.text,
                wanted,
                messages,
                config.tools,
                problem.images,
                problem.identity,
            )
        )
    return prompts


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
        found = _pictures(prompt.images, tokenizer)
    except (OSError, ValueError) as error:
        raise UserError(
            f"The pictures of the prompt '{prompt.id}' cannot be read: {str(error).rstrip('.')}."
        ) from error
    if not {picture.first_id for picture in found} <= set(prompt.token_ids):
        raise UserError(
            f"A picture of the prompt '{prompt.id}' has changed since the prompt was made; restore its file."
        )
    return distinct(found)


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
    tools = [tool_schema(name) for name in config.tools] or None
    try:
        chat = tokenizer.apply_chat_template(list(messages), tools=tools, add_generation_prompt=True, tokenize=False)
    except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"The tokenizer's chat template cannot write the prompt '{problem.id}': {' '.join(str(error).split())}"
        ) from error
    return str(chat), messages


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


def _digest(prompts: Sequence[Prompt]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        said = repr((prompt.problem, prompt.messages, prompt.n, sorted(prompt.entry.items())))
        said += prompt.identity[len(prompt.problem) :]  # pictures
        found.update(said.encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def _read(config: DataConfig, path: str, key: str) -> list[Problem]:
    return read_problems(path, key, config.prompt_key, config.answer_key, config.image_key)
