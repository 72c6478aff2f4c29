"""Data on the Hugging Face hub: whole sets, read by `datasets`, and single files of a set, fetched into its cache."""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from huggingface_hub import HfApi, HfFileSystem, hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..errors import BadRowError, UserError
from ..settings import Place
from .files import WILD, form_of
from .sequences import Row, Rows
from .shards import shards_of

HF = "hf://datasets/"
ADDRESS = re.compile(r"([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?")
WAIT_S = 10.0
"""Time in which the hub must answer; it is taken for unreachable after that."""
LARGE = 2 << 30
"""Bytes above which a slice of a set is read over the network instead of fetching the whole set."""
READ_AT_ONCE = 1000
"""Rows that are read together where all are read."""
SLICE = re.compile(r"([\w.-]+)\[(\d*):(\d+)\]")  # rows from the first number to before the second


@dataclass(frozen=True)
class Address:
    """The parts of an address `hf://datasets/OWNER/NAME@REVISION/INNER`, or of a name OWNER/NAME."""

    repo: str
    revision: str | None
    inner: str
    """File, folder or pattern in the set; empty for all of it."""

    @classmethod
    def of(cls, place: Place) -> Address:
        match = ADDRESS.fullmatch(place.path.removeprefix(HF))
        if match is None:
            raise UserError(
                f"'{place.path}' ({place.key}) is no address of data on the hub; give {HF}OWNER/NAME/FILE, or "
                "OWNER/NAME."
            )
        repo, revision, inner = match.groups()
        return cls(repo, revision and unquote(revision), (inner or "").strip("/"))


@dataclass(frozen=True)
class HubRows:
    """Rows of one split."""

    subset: str
    split: str
    rows: Rows


class SetRows(Rows):
    """Rows of a `datasets.Dataset`, which maps them from its cache.

    Args:
        where: the split, for error messages.
    """

    def __init__(self, dataset: Any, where: str) -> None:
        self._dataset, self._where = dataset, where

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, number: int) -> Row:
        try:
            row: Row = self._dataset[number]
            return row
        except Exception as error:
            raise BadRowError(f"Row {number} of {self._where} cannot be read: {_why(error)}.") from error

    def scan(self) -> Iterator[Row | BadRowError]:
        for first in range(0, len(self), READ_AT_ONCE):
            last = min(first + READ_AT_ONCE, len(self))
            try:
                columns = self._dataset[first:last]
            except Exception:  # one of them cannot be read
                yield from map(self._row_or_error, range(first, last))
                continue
            for values in zip(*columns.values(), strict=True):
                yield dict(zip(columns, values, strict=True))

    def _row_or_error(self, number: int) -> Row | BadRowError:
        try:
            return self.row(number)
        except BadRowError as error:
            return error

    def digest(self) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for row in self.scan():
            said = repr(row) if isinstance(row, BadRowError) else repr(sorted(row.items()))
            digest.update(said.encode("utf-8", "surrogatepass"))
        return digest.digest()


def hub_rows(place: Place) -> HubRows:
    """Return the rows of a split of a set; pictures stay encoded.

    Raises:
        UserError: the set, the subset or the split does not exist, cannot be read, or cannot be told; or the hub cannot
            be reached and the cache of `datasets` does not have it.
    """
    try:
        import datasets  # here, as only sets on the hub need it
    except ImportError as error:
        raise UserError(
            f"'{place.path}' ({place.key}) is a set on the hub, which `datasets` reads; install it with `pip install "
            "'rolltree[hub]'`, or give a file."
        ) from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    address = Address.of(place)
    commit = _commit(address, place)
    with _as_sentences(place, address), _offline(datasets, commit is None):
        builder = _builder(datasets, place, address, commit)
        if commit is None and address.revision and not str(builder.hash).startswith(address.revision):
            raise _unreachable(place, f"the cache has revision {builder.hash} of it")
        split = _split(builder, place)
        rows = None
        if commit is not None and (part := SLICE.fullmatch(split)) and _is_large(builder, address, commit):
            rows = _streamed(datasets, builder, part[1], int(part[2] or 0), int(part[3]))
        if rows is None:
            builder.download_and_prepare()
            dataset = builder.as_dataset(split=split)
            rows = _encoded(dataset, dataset.features)
    _check_count(len(rows), split, place)
    return HubRows(builder.config.name, split, SetRows(rows, f"'{place.path}' ({split})"))


def hub_files(place: Place) -> dict[str, Path]:
    """Return the files that an address names, fetched into the hub's cache, by their own addresses.

    A pattern or a folder is listed at one commit.

    Raises:
        UserError: there are none, or the hub cannot be reached and its cache does not have the file.
    """
    address = Address.of(place)
    commit = _commit(address, place)
    with _as_sentences(place, address):
        if form_of(address.inner) is not None and not WILD.search(address.inner):
            try:
                file = hf_hub_download(
                    address.repo,
                    address.inner,
                    repo_type="dataset",
                    revision=address.revision,
                    local_files_only=commit is None,
                )
            except LocalEntryNotFoundError as error:
                raise _unreachable(place, "the hub's cache does not have the file") from error
            return {place.path: Path(file)}
        if commit is None:
            raise _unreachable(place, "which files there are is not known without it; name one file")
        root, files = f"datasets/{address.repo}@{commit}/", HfFileSystem()
        if WILD.search(address.inner):
            inside = [name.removeprefix(root) for name in files.glob(root + address.inner) if files.isfile(name)]
        else:
            folder = f"{root}{address.inner}/"
            below = [name.removeprefix(folder) for name in files.find(folder)]
            inside = [f"{address.inner}/{name}" for name in shards_of(below, place.path.rstrip("/"), place.key)]
        shown = place.path.rstrip("/").removesuffix(address.inner)
        return {
            f"{shown}{name}": Path(hf_hub_download(address.repo, name, repo_type="dataset", revision=commit))
            for name in sorted(inside)
        }


def _commit(address: Address, place: Place) -> str | None:
    """Return the commit of a set on the hub; None if the hub cannot be reached or does not serve.

    Raises:
        UserError: the hub has no such set or revision, or does not show it.
    """
    with _as_sentences(place, address):
        try:
            return HfApi().dataset_info(address.repo, revision=address.revision, timeout=WAIT_S).sha
        except HfHubHTTPError as error:
            if error.response.status_code < 500 and error.response.status_code != 429:
                raise
            return None
        except Exception:  # offline mode, and whatever the client raises without a network
            return None


@contextlib.contextmanager
def _offline(datasets: Any, really: bool) -> Iterator[None]:
    """Let `datasets` look only into its cache, instead of trying the hub for half a minute."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = before or really
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _builder(datasets: Any, place: Place, address: Address, commit: str | None) -> Any:
    try:
        return datasets.load_dataset_builder(address.repo, place.subset, revision=commit or address.revision)
    except Exception as error:
        if commit is None:
            why = f": {_why(error)}" if isinstance(error, ValueError) else ""
            raise _unreachable(place, f"the cache of `datasets` does not have it{why}") from error
        if not isinstance(error, ValueError):
            raise
        names = datasets.get_dataset_config_names(address.repo, revision=commit)
        if place.subset in names or (place.subset is None and len(names) == 1):
            raise
        wrong = "needs a subset" if place.subset is None else f"has no subset '{place.subset}'"
        raise UserError(
            f"'{place.path}' ({place.key}) {wrong}; set {place.subset_key} to one of {', '.join(names)}."
        ) from error


def _split(builder: Any, place: Place) -> str:
    """Return the split to read: the one that is asked for, or the only one."""
    names = [str(name) for name in builder.info.splits or builder.config.data_files or {}]
    if place.split is None:
        if len(names) == 1:
            return names[0]
        raise UserError(
            f"'{place.path}' ({place.key}) has several splits; set {place.split_key} to one of {', '.join(names)}."
        )
    for part in place.split.split("+"):
        name = part.partition("[")[0].strip()
        if names and name not in names:
            raise UserError(
                f"'{place.path}' ({place.key}) has no split '{name}'; set {place.split_key} to one of "
                f"{', '.join(names)}, or to a part such as '{names[0]}[:1000]'."
            )
    return place.split


def _is_large(builder: Any, address: Address, commit: str) -> bool:
    """Return whether fetching the set, which is not in the cache, takes more than `LARGE` bytes."""
    if Path(builder.cache_dir).is_dir():
        return False
    size = builder.info.download_size
    if size is None:
        files = HfApi().dataset_info(address.repo, revision=commit, files_metadata=True, timeout=WAIT_S).siblings
        size = sum(file.size or 0 for file in files or ())
    return bool(size > LARGE)


def _streamed(datasets: Any, builder: Any, split: str, first: int, end: int) -> Any:
    """Return the rows from ``first`` to before ``end`` in memory, as a dataset, fetching little more; None if their
    types are not known before all rows are read, which would make them depend on how many are."""
    stream = builder.as_streaming_dataset(split=split)
    if stream.features is None:
        return None
    rows = iter(_encoded(stream.skip(first).take(end - first), stream.features))
    plain = datasets.Features({name: _plain(feature) for name, feature in stream.features.items()})
    parts = []
    while part := list(islice(rows, READ_AT_ONCE)):
        parts.append(datasets.Dataset.from_list(part, plain))
    return datasets.concatenate_datasets(parts) if parts else datasets.Dataset.from_list([], plain)


def _check_count(rows: int, split: str, place: Place) -> None:
    part = SLICE.fullmatch(split)
    expected = max(1, int(part[3]) - int(part[2] or 0) if part else 1)
    if rows < expected:
        raise UserError(
            f"'{split}' of '{place.path}' ({place.split_key}) has {rows} rows, fewer than {expected}; name a part "
            "that the set has."
        )


def _encoded(dataset: Any, features: Any) -> Any:
    """Return a dataset whose pictures, sounds and the like are bytes and paths."""
    for column, feature in features.items():
        if (plain := _plain(feature)) is not feature:
            dataset = dataset.cast_column(column, plain)
    return dataset


def _plain(feature: Any) -> Any:
    """Return a feature that leaves media encoded; the same object if there are none in it."""
    if isinstance(feature, dict):
        inner = {name: _plain(each) for name, each in feature.items()}
        return feature if all(inner[name] is each for name, each in feature.items()) else inner
    if getattr(feature, "decode", None) is True and type(feature).__name__ != "Json":
        return type(feature)(decode=False)
    below = getattr(feature, "feature", None)
    if below is None or (plain := _plain(below)) is below:
        return feature
    return type(feature)(plain)


@contextlib.contextmanager
def _as_sentences(place: Place, address: Address) -> Iterator[None]:
    """Turn what `datasets` and the hub raise into sentences."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(_sentence(error, place, address)) from error


def _sentence(error: Exception, place: Place, address: Address) -> str:
    chain: list[BaseException] = [error]
    while (above := chain[-1].__cause__ or chain[-1].__context__) is not None and above not in chain:
        chain.append(above)
    what = f"'{place.path}' ({place.key})"
    kinds = {kind for each in chain for kind in type(each).__mro__}
    if GatedRepoError in kinds or "gated dataset" in str(error):  # `datasets` leaves out what its error comes from
        return (
            f"{what} is a gated set on the hub; ask for access at https://huggingface.co/datasets/{address.repo} and "
            "log in with `hf auth login`."
        )
    if RevisionNotFoundError in kinds:
        return f"{what} names a revision '{address.revision}' that the set does not have; correct it or leave it out."
    if RepositoryNotFoundError in kinds:
        here = "" if place.path.startswith(HF) else "there is no such file or folder here, and "
        return (
            f"{what} is not found: {here}the hub has no set '{address.repo}' that you may read; correct the name, or "
            "log in with `hf auth login` if it is private."
        )
    status = next((each.response.status_code for each in chain if isinstance(each, HfHubHTTPError)), None)
    if status is not None and not isinstance(error, FileNotFoundError):
        if status == 404:
            return f"{what} is not found: the set '{address.repo}' has no '{address.inner}'; correct the address."
        return f"{what} cannot be fetched: the hub answers with status {status}; try again later or give a local file."
    return f"{what} cannot be read: {_why(chain[-2] if 'Generation' in type(error).__name__ else error)}."


def _unreachable(place: Place, why: str) -> UserError:
    return UserError(
        f"'{place.path}' ({place.key}) is not here, the hub cannot be reached, and {why}; fetch it while there is a "
        "network, or give a local file."
    )


def _why(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
