"""Checkpoints: everything a run needs to continue as if it had never stopped.

``checkpoints/step_000040/`` holds the learner's tensors (weights, optimiser) in ``learner/``, a file for each rank that
trains; the run's tensors (open groups, torch's generators) in ``run.safetensors``; ``state.json`` (the rest, and the
settings of the training) and ``manifest.json`` (size and SHA-256 of each). The directory is written as
``step_000040.tmp``, synced to disk and renamed, so under its final name it is complete, and a failed write leaves the
earlier checkpoints unchanged. Each rank writes, syncs and fingerprints its file, the run all others.

`torch.distributed.checkpoint` writes and reads the learner's tensors in its safetensors format: each file records which
part of which tensor it holds, so another number of ranks can read them, and nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..errors import RunError, UserError
from .group import ALONE, Group

FORMAT = 8
LEARNER, RUN, STATE, MANIFEST = "learner", "run.safetensors", "state.json", "manifest.json"
Files = dict[str, dict[str, Any]]
"""Size and SHA-256 of files, by name."""


class Saved(NamedTuple):
    """The part of a learner in a checkpoint: the files that it wrote, and its state as values for JSON."""

    files: Files
    state: dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory but for the learner's tensors, which it reads itself; tensors are on the CPU."""

    path: Path
    step: int
    learner: Path
    """The directory of the learner's tensors."""
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    generators: tuple[dict[str, Tensor], dict[str, Any]]
    """The arguments of `restore_generators`."""
    trained: dict[str, Any]
    """The keys of the run's configuration that decide what is learned, as ``{dotted key: value}``."""


def save(
    directory: Path,
    step: int,
    *,
    learner: Callable[[Path], Saved],
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    trained: Mapping[str, Any],
    keep: int,
    spare: int | None = None,
) -> Path:
    """Write ``directory/step_<step>`` with the current state of the random number generators, and delete older ones.

    Args:
        learner: writes the learner's tensors into a directory; its state becomes ``state["learner"]``.
        tensors: the run's, on any device; no two may share memory.
        state: can be written as JSON.
        trained: the keys of the configuration that decide what is learned.
        keep: the number of newest checkpoints to keep.
        spare: a step whose checkpoint is kept in addition.

    Returns:
        The checkpoint's directory.

    Raises:
        RunError: the disk is full or cannot be written; the earlier checkpoints are intact.
    """
    final = directory / f"step_{step:06d}"
    temporary = final.with_name(final.name + ".tmp")
    generator_tensors, generators = generator_state()
    everything = {name: tensor.detach().contiguous() for name, tensor in tensors.items()} | generator_tensors
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob("*.tmp"):
            shutil.rmtree(leftover)
        temporary.mkdir()
        (temporary / LEARNER).mkdir()
        saved = learner(temporary / LEARNER)
        save_file(everything, temporary / RUN)
        document = {"state": {**state, "learner": saved.state}, "generators": generators, "config": dict(trained)}
        (temporary / STATE).write_text(json.dumps(document), encoding="utf-8")
        files = {name: _fingerprint(temporary / name) for name in (RUN, STATE)}
        files |= {f"{LEARNER}/{name}": file for name, file in saved.files.items()}
        manifest = {"format": FORMAT, "step": step, "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for path in (*(temporary / name for name in (RUN, STATE, MANIFEST, LEARNER)), temporary):
            sync(path)
        temporary.rename(final)
        sync(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        before = latest(directory)
        then = f"'{before}' is intact: free disk space and use --resume" if before else "free disk space and start over"
        raise RunError(f"The checkpoint '{final}' could not be written ({error}); {then}.") from error
    for _, old in [checkpoint for checkpoint in _complete(directory)[:-keep] if checkpoint[0] != spare]:
        doomed = old.with_name(old.name + ".tmp")  # a partly removed directory must not look complete
        old.rename(doomed)
        shutil.rmtree(doomed)
    return final


def load_latest(directory: Path, trained: Mapping[str, Any]) -> Checkpoint:
    """Load the newest checkpoint of a run that is to be continued.

    Args:
        trained: the current keys of the configuration that decide what is learned.

    Raises:
        UserError: there is none, it is corrupt, or ``trained`` differs from the configuration that it was trained with.
    """
    path = latest(directory)
    if path is None:
        raise UserError(
            f"There is nothing to resume: '{directory}' holds no complete checkpoint; start without --resume."
        )
    checkpoint = load(path)
    for key in sorted(checkpoint.trained.keys() | trained.keys()):
        old, new = checkpoint.trained.get(key), trained.get(key)
        if old != new:
            raise UserError(
                f"`{key}` is {json.dumps(new)} but the run of '{path}' was trained with {json.dumps(old)}; "
                "set it back to resume, or start a new run under another name."
            )
    return checkpoint


def latest(directory: Path) -> Path | None:
    """Return the path of the newest checkpoint, or None. A ``.tmp`` left by a killed run does not count."""
    complete = _complete(directory)
    return complete[-1][1] if complete else None


def load(path: Path) -> Checkpoint:
    """Read ``path`` and verify its checksums.

    Raises:
        UserError: a file is missing, truncated or altered; another checkpoint is never loaded instead.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version, step, files = manifest["format"], int(manifest["step"]), dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _corrupt(path, f"'{MANIFEST}' cannot be read ({error})") from error
    if version != FORMAT:
        raise UserError(
            f"The checkpoint '{path}' has format {version} and this rolltree reads format {FORMAT}; "
            "resume with the version that wrote it."
        )
    for name in sorted(files.keys() | {STATE} | {str(p.relative_to(path)) for p in path.rglob("*.safetensors")}):
        try:
            fingerprint = _fingerprint(path / name)
        except OSError as error:
            raise _corrupt(path, f"'{name}' cannot be read ({error.strerror})") from error
        if fingerprint != files.get(name):
            raise _corrupt(path, f"'{name}' is not as it was written (its size or SHA-256 differs)")
    document = json.loads((path / STATE).read_text(encoding="utf-8"))
    tensors = load_file(path / RUN)
    generators = {name: tensors.pop(name) for name in list(tensors) if name.startswith("generator.")}
    random_state = generators, document["generators"]
    return Checkpoint(path, step, path / LEARNER, tensors, document["state"], random_state, document["config"])


# -- random number generators ------------------------------------------------------------------------------------------


def generator_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of the global generators: torch's as tensors, numpy's and Python's as values for JSON."""
    tensors = {"generator.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"generator.cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    return tensors, {
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), gauss_next],
    }


def restore_generators(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Restore the result of `generator_state`. States of devices that this machine does not have are ignored."""
    torch.set_rng_state(tensors["generator.cpu"])
    for index in range(torch.cuda.device_count()):
        if f"generator.cuda.{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"generator.cuda.{index}"], index)
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))


# -- tensors -----------------------------------------------------------------------------------------------------------


def write_tensors(directory: Path, tensors: Mapping[str, Tensor], group: Group = ALONE) -> Files:
    """Write the learner's tensors, each rank its shards and a part of what all have whole; all ranks must call it.

    Args:
        tensors: of this rank, on any device; no two may share memory.

    Returns:
        The files of all ranks.

    Raises:
        OSError: a rank's file cannot be written.
    """
    everything = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with _told_plainly():
        dcp.save(
            everything,
            storage_writer=HuggingFaceStorageWriter(str(directory), save_distributed=True),
            no_dist=group.count == 1,
        )
    rank_files: Files = {}
    for path in directory.glob(f"shard-{group.rank + 1:05d}-*"):
        sync(path)
        rank_files[path.name] = _fingerprint(path)
    sync(directory)
    return {name: file for files in group.gather(rank_files) for name, file in files.items()}


def read_tensors(
    directory: Path, like: Callable[[str, torch.Size], Tensor | None] | None = None, group: Group = ALONE
) -> dict[str, Tensor]:
    """Read the tensors that `write_tensors` wrote with any number of ranks; all ranks must call it.

    Args:
        like: returns the tensor of this rank that is sharded as the one of that name and size is to be; None: a whole
            tensor on the CPU, as all are by default.
    """
    reader = HuggingFaceStorageReader(str(directory))
    tensors = {}
    for name, one in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(one, TensorStorageMetadata)
        ours, dtype = None if like is None else like(name, one.size), one.properties.dtype
        tensors[name] = torch.empty(one.size, dtype=dtype) if ours is None else torch.empty_like(ours, dtype=dtype)
    with _told_plainly():
        dcp.load(tensors, storage_reader=reader, no_dist=group.count == 1)
    return tensors


@contextmanager
def _told_plainly() -> Iterator[None]:
    """Raise the error itself and not a report on ranks; hide the warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            yield
        except CheckpointException as report:
            raise next(error for error, _ in report.failures.values()) from report


# -- helpers -----------------------------------------------------------------------------------------------------------


def _complete(directory: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of the complete checkpoints, in ascending order."""
    candidates = [(re.fullmatch(r"step_(\d+)", path.name), path) for path in directory.glob("step_*")]
    return sorted((int(match[1]), path) for match, path in candidates if match)


def _corrupt(path: Path, why: str) -> UserError:
    order = _complete(path.parent)
    older = [str(p) for step, p in order if step < max(s for s, q in order if q == path)]
    then = f"to resume from '{older[-1]}'" if older else "and start again, since there is no older one"
    return UserError(f"The checkpoint '{path}' is corrupt: {why}; move that directory away {then}.")


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def sync(path: Path) -> None:
    """Wait until a file, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
