"""Verifiers by name: functions of a response's text and its problem's entry.

A verdict is a number; or None, to give the response no credit; or a dict with a ``reward`` (a number or None), further
numbers by name, and optionally

- ``spans``: a list of ``(begin, end, value)``, rewards of characters of the text;
- ``unparsed``: a word for the reason why there was nothing to judge (the reward counts all the same, usually 0), so
  that metrics distinguish a response in the wrong form from a wrong answer;
- ``skipped``: a word for the reason why the reward is None.

A verifier may have a method ``check(entry)``, called for each problem before a run; it raises ValueError if it could
judge no response to the problem.

Imports nothing of rolltree but files of this folder with the same property: the verifiers' processes (`worker.py`) load
it without the rest.
"""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from .answers import extract_answer, tidy
from .bounded import Bounded
from .group_judges import JUDGES, Pairwise
from .loading import user_verifier
from .math.mathematics import judge, parse, read_reference
from .math.reading import number
from .references import reference_text

Verifier = Callable[[str, dict[str, Any]], Any]

WORD = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""The form of ``unparsed`` and ``skipped``, which become parts of metric names."""
NO_ANSWER: dict[str, Any] = {"reward": 0.0, "unparsed": "no_answer"}


def load_verifier(
    name: str, tasks: list[tuple[str, dict[str, Any]]], options: dict[str, Any], timeout_s: float
) -> tuple[Verifier, str]:
    """Return the verifier that ``name`` names, and a sentence about it for the user (empty: none).

    Args:
        name: ``task``, ``code``, a name in `BUILT_IN` or `JUDGES`, or ``file.py:function``.
        tasks: names and options of the `reasoning_gym` tasks, for ``task``.
        timeout_s: the time limit of a verdict, in seconds.

    Raises:
        ValueError: the verifier has no such option, or rejects its value.
        FileNotFoundError, AttributeError: there is no such file or function.
    """
    if name == "task":
        _check_options(name, {}, options)
        task = TaskVerifier(tasks)
        return Bounded(task, task.score_own, timeout_s), ""
    if name in BUILT_IN:
        make = BUILT_IN[name]
        _check_options(name, inspect.signature(make).parameters, options)
        verifier = make(**options)
        return Bounded(verifier, verifier.check, timeout_s), ""
    if name == "code":
        from .code.verifier import CodeVerifier  # imported here, since it needs a parser of Markdown

        _check_options(name, inspect.signature(CodeVerifier).parameters, {"timeout_s": 0, **options})
        code = CodeVerifier(timeout_s, **options)
        return code, f"Code in responses runs in {code.containment}"
    if name in JUDGES:
        _check_options(name, inspect.signature(JUDGES[name]).parameters, options)
        filled = dict(options)
        if issubclass(JUDGES[name], Pairwise) and isinstance(compare := options.get("compare"), str):
            filled["compare"] = user_verifier(compare)
        return JUDGES[name](**filled), ""
    verify = user_verifier(name)
    _check_options(name, inspect.signature(verify).parameters, options)
    return (partial(verify, **options) if options else verify), ""


def _check_options(name: str, accepted: Any, options: dict[str, Any]) -> None:
    if any(getattr(p, "kind", None) is inspect.Parameter.VAR_KEYWORD for p in dict(accepted).values()):
        return
    if unknown := sorted(set(options) - set(accepted)):
        raise ValueError(f"it has no option '{unknown[0]}' (reward.options)")


class MathVerifier:
    """Compares the answer of the response with the reference by math-verify; see `mathematics.py`."""

    def __init__(self) -> None:
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of missing time limits, which the pool has
        parse(r"\frac{1}{2}")  # builds its parser's tables, which can take longer than a verdict may

    def __call__(self, text: str, entry: dict[str, Any]) -> Any:
        verdict = judge(text, read_reference(reference_text(entry["answer"])))
        return NO_ANSWER if verdict is None else verdict

    def check(self, entry: dict[str, Any]) -> None:
        read_reference(reference_text(entry["answer"]))


class ExactVerifier:
    """Compares the marked answer of the response, or the whole response, with the reference as texts.

    Emphasis, ``$`` and a full stop around an answer are ignored. If the reference marks an answer, that answer is
    compared; a reference that is a number in the data is compared as a number.
    """

    def __call__(self, text: str, entry: dict[str, Any]) -> Any:
        reference = reference_text(entry["answer"])
        if text.strip() == reference:
            return 1.0
        expected, said = extract_answer(reference) or reference, extract_answer(text)
        if said is None:
            return NO_ANSWER
        return float(
            said in (expected, reference) or tidy(said) == tidy(expected) or _same_number(said, entry["answer"])
        )

    def check(self, entry: dict[str, Any]) -> None:
        reference_text(entry["answer"])


class RegexVerifier:
    """Compares the last match of ``pattern`` (its first group, if it has one) with the reference."""

    def __init__(self, pattern: str, ignore_case: bool = False) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
        except re.error as error:
            raise ValueError(f"its option 'pattern' is no regular expression: {error}") from None
        self._ignore_case = ignore_case

    def __call__(self, text: str, entry: dict[str, Any]) -> Any:
        matches = list(self._pattern.finditer(text))
        if not matches:
            return NO_ANSWER
        said, expected = (matches[-1][1 if self._pattern.groups else 0] or "").strip(), reference_text(entry["answer"])
        if self._ignore_case:
            said, expected = said.casefold(), expected.casefold()
        return float(said == expected or _same_number(said, entry["answer"]))

    def check(self, entry: dict[str, Any]) -> None:
        reference_text(entry["answer"])


def _same_number(said: str, answer: Any) -> bool:
    """Return True if a text is the number of a numeric reference; False if the reference is a text."""
    if isinstance(answer, str):
        return False
    value = number(tidy(said))
    return value is not None and value == number(reference_text(answer))


BUILT_IN: dict[str, Callable[..., MathVerifier | ExactVerifier | RegexVerifier]] = {
    "math": MathVerifier,
    "exact": ExactVerifier,
    "regex": RegexVerifier,
}


class TaskVerifier:
    """Judges a response by the `reasoning_gym` task that generated its problem (`data.tasks`)."""

    def __init__(self, tasks: list[tuple[str, dict[str, Any]]]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of cellpylib, which it imports
            import reasoning_gym

        self._datasets = [reasoning_gym.create_dataset(task, **options) for task, options in tasks]

    def __call__(self, text: str, entry: dict[str, Any]) -> Any:
        answer = extract_answer(text)
        score = self._datasets[entry["task_index"]].score_answer
        if answer is None:
            return NO_ANSWER | {"reward": score(None, entry)}
        return max(score(form, entry) for form in dict.fromkeys((answer, tidy(answer))))  # **72** is 72

    def score_own(self, entry: dict[str, Any]) -> None:
        """Raise what the task raises for an entry whose own answer it cannot judge."""
        self._datasets[entry["task_index"]].score_answer(entry["answer"], entry)
