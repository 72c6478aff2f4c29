"""The configuration of a run: a TOML file, checked by pydantic, with dotted overrides from the command line.

Precedence: defaults < recipe (`recipes`) < TOML file < ``--section.key value``. Every mistake is a :class:`UserError`
of one sentence that names the file (or the flag), the key, and what is allowed.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from ..errors import RefusedError, UserError
from ..methods.papers import OWN_ADVANTAGE, OWN_SELECTION
from ..settings import Section, TrainConfig
from .keys import MAX_SHOWN, config_keys, nearest, required, toml_value
from .recipes import combined, needs, read_recipe, with_updates

OBJECT = re.compile(r"[^\n]+\.py:[A-Za-z_]\w*")
"""The form `file.py:object`."""


MAX_DEPTH = 24
"""Greatest depth of nested tables and arrays; options of programs need a few levels."""
MAX_BYTES = 256 * 1024
"""Largest configuration file, in bytes; those of whole runs have a few thousand."""
MAX_DOTS = 1000
"""Largest number of dots in a line, as parsing takes time quadratic in the parts of a key."""


def load_config(path: str | Path, overrides: Sequence[str] | Sequence[tuple[str, str]] = ()) -> TrainConfig:
    """Read and check the configuration of a run.

    Args:
        path: TOML file; each `file.py:object` in it is relative to its directory.
        overrides: ``["--trainer.lr", "1e-6", "--seed=1"]`` or ``[("trainer.lr", "1e-6"), ("seed", "1")]``. Values are
            TOML (numbers, booleans, strings, arrays, inline tables); a value that is not TOML is taken as a string.
            Paths in overrides are relative to the working directory.

    Returns:
        The configuration, frozen, with defaults filled in.

    Raises:
        UserError: unreadable or broken file, unknown key or recipe, wrong type or range, keys that contradict each
            other.
    """
    path = Path(path)
    data, flags, _ = read_tables(path, overrides)
    if data.get("stages"):
        raise UserError(
            f"'{path}' has stages, which only `rolltree train` runs, one after another; give the config.toml in the "
            "directory of one of its runs."
        )
    return checked(data, path, flags)


def read_tables(
    path: Path, overrides: Sequence[str] | Sequence[tuple[str, str]]
) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """Return the tables of a file with its recipe under them and the overrides over them, the overrides' texts, and
    their values; all by dotted key. Raises as `load_config`."""
    data = _read_toml(path)
    _check_plain(data, str(path))
    _resolve_callables(data, path.parent)
    types = {k.key: k.type for k in config_keys()}
    flags = _parse_overrides(overrides, types)
    values: dict[str, Any] = {}
    for key, text in flags.items():
        values[key] = _parse_value(text, types.get(key, "any"))
        _check_plain({key: values[key]}, f"--{key}")
    _resolve_callables(values, Path())
    for key, value in values.items():
        put(data, key, value)
    if isinstance(recipe := data.get("recipe"), str):
        data = combined(read_recipe(recipe).keys, data)
    return data, flags, values


def checked(data: dict[str, Any], path: Path, flags: dict[str, str]) -> TrainConfig:
    """Return the configuration of ``data``; raises as `load_config`."""
    try:
        return _validate(with_updates(data))
    except ValidationError as error:
        refused = error.errors()[0].get("ctx", {}).get("error")
        if isinstance(refused, RefusedError):
            raise RefusedError(refused.refusals, f"'{path}'{_with(flags)}: ") from None
        raise UserError(_sentence(error, path, flags) + needs(data, error)) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise UserError(
                f"The configuration file {_quoted(path)} exceeds {MAX_BYTES >> 10} KiB; keep prompts and data in files "
                "of their own."
            )
        return _parsed(raw.decode("utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"There is no configuration file '{path}'; give the path of a TOML file.") from None
    except OSError as error:
        raise UserError(f"The configuration file {_quoted(path)} cannot be read: {error.strerror}.") from None
    except RecursionError:
        raise UserError(f"The configuration file '{path}' nests its tables and arrays too deeply.") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"The configuration file '{path}' is not a TOML file: line {line} is not UTF-8 text.") from None
    except ValueError as error:  # a TOMLDecodeError, a number of thousands of digits, a path with a zero byte
        raise UserError(f"The configuration file {_quoted(path)} is not valid TOML: {_quoted(error)[1:-1]}.") from None


def _parsed(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: ``text`` is not TOML, or has a line that would take the parser minutes.
    """
    for i, line in enumerate(text.split("\n"), 1):
        if line.count(".") > MAX_DOTS:
            raise ValueError(f"line {i} has more than {MAX_DOTS} dots; break it")
    return tomllib.loads(text)


def _check_plain(value: Any, where: str, key: str = "", depth: int = 0) -> None:
    """Reject values that are valid TOML but that no file system, tokenizer or number format accepts.

    Raises:
        UserError: a text with a zero byte or half a character, a number beyond 64 bits or not finite, or tables nested
            deeper than any setting.
    """
    fault = None
    if isinstance(value, str) and ("\0" in value or not _is_unicode(value)):
        fault = "it holds a zero byte or half a character"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        fault = "it does not fit in 64 bits"
    elif isinstance(value, float) and not math.isfinite(value):
        fault = f"it must be a finite number and is {value}"
    elif depth > MAX_DEPTH:
        fault = "it is nested too deeply"
    if fault is not None:
        raise UserError(f"{_quoted(where)}: `{_quoted(key)[1:-1]}` is not allowed: {fault}.")
    if isinstance(value, dict):
        for name, inner in value.items():
            path = f"{key}.{name}" if key else name
            _check_plain(name, where, path, depth + 1)
            _check_plain(inner, where, path, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check_plain(inner, where, key, depth + 1)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _quoted(text: object) -> str:
    """Quote the user's text for an error message: on one line, printable, at most `MAX_SHOWN` characters."""
    shown = " ".join(str(text).encode("utf-8", "backslashreplace").decode().split())
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in shown)
    return f"'{shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + '...'}'"


def _parse_overrides(overrides: Sequence[str] | Sequence[tuple[str, str]], types: Mapping[str, str]) -> dict[str, str]:
    """Return ``{dotted key: text}``; the last of several values of a key wins, as on any command line."""
    texts: dict[str, str] = {}
    waiting: str | None = None
    for item in overrides:
        if isinstance(item, tuple):
            texts[_override_key(item[0], types)] = item[1]
        elif waiting is not None:
            texts[waiting], waiting = item, None
        elif not item.startswith("--"):
            raise UserError(f"{_quoted(item)} stands alone on the command line; give overrides as --trainer.lr 1e-6.")
        else:
            name, equals, text = item.removeprefix("--").partition("=")
            name = _override_key(name, types)
            if equals:
                texts[name] = text
            else:
                waiting = name
    if waiting is not None:
        raise UserError(f"--{waiting} needs a value, as in --{waiting} VALUE.")
    return texts


def _override_key(key: str, types: Mapping[str, str]) -> str:
    """Return ``key`` of the configuration, of which ``types`` has every key.

    Raises:
        UserError: no flag sets it.
    """
    for parent in (name for name, kind in types.items() if kind == "list of tables" and key.startswith(f"{name}.")):
        raise UserError(
            f"--{key} names a key inside the list `{parent}`; give the whole list as --{parent} '[{{name = \"...\"}}]'."
        )
    sections = {name.rpartition(".")[0] for name in types}
    free = (name for name, kind in types.items() if kind == "table" and name not in sections)
    if key in types or any(key.startswith(f"{table}.") for table in free):
        return key
    raise UserError(f"--{_quoted(key)[1:-1]} is not a key of the configuration; {nearest(key)}.")


def _parse_value(text: str, kind: str) -> Any:
    """Parse ``text`` as a TOML value; it stays a string if it is not TOML, is a date, or the key takes a string."""
    try:
        table = _parsed(f"v = {text}")
    except (ValueError, RecursionError):
        return text
    value = table["v"]
    one_value = len(table) == 1 and not isinstance(value, datetime.date | datetime.time)
    of_kind = isinstance(value, str) or not (kind == "string" or kind.startswith('"'))
    return value if one_value and of_kind else text


def put(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key of tables. If a parent is not a table, nothing is set, and validation reports it."""
    *tables, leaf = key.split(".")
    for table in tables:
        inner = data.setdefault(table, {})
        if not isinstance(inner, dict):
            return
        data = inner
    data[leaf] = value


def _resolve_callables(data: dict[str, Any], base: Path) -> None:
    """Make the file of each `file.py:object` absolute, under any key; it is relative to ``base``."""

    def absolute(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: absolute(v) for key, v in value.items()}
        if isinstance(value, list):
            return [absolute(v) for v in value]
        if isinstance(value, str) and OBJECT.fullmatch(value):
            file, _, name = value.rpartition(":")
            return f"{(base / file).resolve()}:{name}"
        return value

    data.update(absolute(data))


def _with_parts_of_papers(data: dict[str, Any]) -> dict[str, Any]:
    """Give objectives the advantage and the selection of their papers where the configuration names none."""
    algorithm, roles = data.get("algorithm", {}), data.get("roles")
    if not isinstance(algorithm, dict):
        return data
    advantage = OWN_ADVANTAGE.get(str(algorithm.get("objective", "")))
    if isinstance(roles, dict) and roles.get("critic") is not None:
        advantage = "gae"
    algorithm = _with_selection(algorithm)
    if isinstance(terms := algorithm.get("terms"), list):
        algorithm |= {"terms": [_with_selection(term) if isinstance(term, dict) else term for term in terms]}
    return data | {"algorithm": algorithm if advantage is None else {"advantage": advantage} | algorithm}


def _with_selection(term: dict[str, Any]) -> dict[str, Any]:
    selection = OWN_SELECTION.get(str(term.get("objective", "")))
    return {**term} if selection is None else {"select": selection} | term


def _validate(data: dict[str, Any]) -> TrainConfig:
    if isinstance(table := data.get("demonstrations"), dict):  # one table of a list
        data = data | {"demonstrations": [table]}
    # JSON mode is strict about types ("5" is not a number, true is not 1) but accepts arrays as tuples.
    return TrainConfig.model_validate_json(json.dumps(_with_parts_of_papers(data), default=str), strict=True)


def _sentence(error: ValidationError, path: Path, flags: dict[str, str]) -> str:
    """Describe one mistake in a sentence, unknown keys first, as a misspelt key often explains a missing one."""
    rank = {"extra_forbidden": 0, "missing": 2, "value_error": 3}
    mistakes = sorted(error.errors(), key=lambda e: rank.get(e["type"], 1))
    first, more = mistakes[0], len(mistakes) - 1
    key = ".".join(str(part) for part in first["loc"] if not isinstance(part, int))
    flag = next((k for k in flags if key and (key == k or key.startswith(f"{k}."))), None)
    where = f"--{flag}" if flag else _quoted(path)
    rest = f" ({more} more {'mistake' if more == 1 else 'mistakes'} after this one)" if more else ""
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
    if first["type"] == "extra_forbidden":
        return f"{where}: there is no key `{_quoted(key)[1:-1]}`; {nearest(key)}{rest}."
    if first["type"] == "missing":
        lacking = [f"`{k}`" for k in required() if k == key or k.startswith(f"{key}.")] or [f"`{key}`"]
        return f"{where} lacks {' and '.join(lacking)}; add {'it' if len(lacking) == 1 else 'them'}{rest}."
    if isinstance(first["input"], dict) and first["type"] == "value_error":
        return f"'{path}'{_with(flags)}: {message}{rest}."
    return f"{where}: `{key}` = {toml_value(first['input'])} is not allowed: {message}{rest}."


def _with(flags: dict[str, str]) -> str:
    return f" with {', '.join(f'--{key}' for key in flags)}" if flags else ""


def resolved_toml(config: TrainConfig) -> str:
    """Write the whole configuration, with defaults, as TOML that `load_config` reads back to an equal one.

    Keys of a recipe are written like all others and its name is a comment, so that the text stays what it is when the
    recipe changes.
    """
    recipe = "" if config.recipe is None else f"# the keys of recipe '{config.recipe}' are written out\n"
    left_out: dict[str, Any] = {"recipe": True, "stages": True}
    if config.reward.parts:
        left_out["reward"] = {"verifier", "options"}  # of no effect, and refused together with parts
    return recipe + tomli_w.dumps(config.model_dump(exclude_none=True, exclude=left_out))


FREE_TO_CHANGE = (
    "name",
    "recipe",
    "stages",
    "output_dir",
    "trackers",
    "model.create",
    "model.device",
    "model.gradient_checkpointing",
    "data.on_bad_row",
    "rollout.max_batch_rows",
    "rollout.kv_tokens",
    "rollout.engines",
    "rollout.send_changes",
    "placement.cluster",
    "placement.per_rank",
    "placement.per_engine",
    "placement.layout",
    "placement.hang_s",
    "placement.start_s",
    "placement.restarts",
    "reward.workers",
    "reward.hosts",
    "reward.max_failed_steps",
    "trainer.steps",
    "trainer.max_tokens",
    "trainer.max_bad_steps",
    "trainer.self_check",
    "trainer.ranks",
    "trainer.tensor",
    "trainer.mirror",
    "trainer.timeout_s",
    "trainer.reshard",
    "evaluation.every",
    "evaluation.max_new_tokens",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.best",
    "loop.max_dropped_batches",
)
"""Keys that do not change what is learned; a resumed run must have the original values of all others."""


def training_config(config: TrainConfig) -> dict[str, Any]:
    """Return the keys of ``config`` that decide what is learned, as ``{dotted key: json value}``."""
    return {key: value for key, value in _flat(config, config.model_dump(mode="json")) if key not in FREE_TO_CHANGE}


def _flat(section: Section, table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section:
        if isinstance(value, Section):
            yield from _flat(value, table[name], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", table[name]
