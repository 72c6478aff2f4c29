"""Answers that follow a JSON schema: llguidance computes which tokens may follow, and the engine samples only these."""

from __future__ import annotations

import importlib.util
import re
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from ..chat.ends import turn_end

Array = npt.NDArray[Any]
WHITE_SPACE = r" ?|\n {0,16}|\n\t{0,8}"
"""Between the tokens of JSON: nothing, a blank, or a line break and its indentation. Without a bound a model that is
unsure of the next token writes white space until its answer is cut."""
_TEXT = r"^\S*(\s{1,20}\S+)*\s{0,20}$"
JSON_OBJECT = {
    "$ref": "#/$defs/object",
    "$defs": {
        "object": {
            "type": "object",
            "patternProperties": {_TEXT: {"$ref": "#/$defs/value"}},
            "additionalProperties": False,
        },
        "value": {
            "anyOf": [
                {"type": ["number", "boolean", "null"]},
                {"type": "string", "pattern": _TEXT},
                {"type": "array", "items": {"$ref": "#/$defs/value"}},
                {"$ref": "#/$defs/object"},
            ]
        },
    },
}
"""Any object. As nothing else bounds its texts, each has at most 20 blanks in a row."""


class Grammars:
    """Makes grammars for one tokenizer; the tables they share are built when a request first needs them.

    Args:
        vocabulary: number of the model's logits, which may exceed the tokenizer's tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._tables: Any = None
        self._lock = threading.Lock()

    def of_schema(self, schema: str, responses: int) -> Grammar:
        """Return the grammar of a JSON schema, for ``responses`` sampled at the same time.

        Raises:
            ValueError: llguidance is missing, or does not support the schema or this tokenizer.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise ValueError("Answers that follow a schema need llguidance on the server; install rolltree[grammar].")
        import llguidance
        import llguidance.hf

        with self._lock:
            if self._tables is None:
                try:
                    self._tables = llguidance.hf.from_tokenizer(
                        self._tokenizer, n_vocab=self._vocabulary, eos_token=turn_end(self._tokenizer, chat=True)
                    )
                except Exception as error:  # its native code raises many types
                    raise ValueError(f"This model's tokenizer does not support schemas: {_line(error)}") from error
        try:
            rules = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE}
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=rules)
            start = llguidance.LLMatcher(self._tables, grammar)
            problem = start.get_error() if start.is_error() else ""
        except Exception as error:
            problem = _line(error)
        if away := re.match("Resource '(.*?)' is not present", problem):
            raise ValueError(
                f"The schema refers to '{away[1].removeprefix('json-schema:///')}', which is not in it; put what it "
                "needs into its `$defs`."
            )
        if problem:
            raise ValueError(f"The schema is not supported: {' '.join(problem.split())[:500].rstrip('.')}.")
        return Grammar(start, self._vocabulary, responses)


class Grammar:
    """Returns the tokens that may follow a response, as `SamplingParams.prefix_allowed_tokens_fn`.

    The matcher of every response in flight is kept, by the tokens it has consumed, so that a new token costs one move.
    """

    def __init__(self, start: Any, vocabulary: int, responses: int) -> None:
        self._start = start
        self._vocabulary = vocabulary
        self._most = 2 * responses + 2  # those before and after the step's tokens
        self._read: OrderedDict[bytes, Any] = OrderedDict()

    def __call__(self, response: Array) -> Array:  # [tokens] int32 -> [allowed] int64
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        matcher = self._after(np.ascontiguousarray(response, np.int32))
        mask = allocate_token_bitmask(1, self._vocabulary)
        fill_next_token_bitmask(matcher, mask, 0)
        if matcher.is_error():
            raise ValueError(_line(RuntimeError(matcher.get_error())))
        return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._vocabulary])

    def _after(self, response: Array) -> Any:
        key = response.tobytes()
        matcher = self._read.get(key)
        if matcher is None:
            before = self._read.get(response[:-1].tobytes()) if len(response) else None
            matcher = (before or self._start).deep_copy()
            matcher.consume_tokens((response if before is None else response[-1:]).tolist())
            self._read[key] = matcher
        self._read.move_to_end(key)
        while len(self._read) > self._most:
            self._read.popitem(last=False)
        return matcher


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
