"""Engines under an interpreter of their own, ``rollout.python``: refused where it cannot run them, else used."""

from __future__ import annotations

import importlib.metadata
import sys
import venv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rolltree.engine import load_config
from rolltree.engine.app.assembly import sampling as build_sampling
from rolltree.engine.app.assembly import workers as build_workers
from rolltree.engine.errors import UserError

from ...support.tiny import write_job

OWN = f"{sys.version_info.major}.{sys.version_info.minor} 2.60.0"


@pytest.fixture
def ray_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"ray": "2.60.0"}.__getitem__)


def interpreter(folder: Path, script: str) -> str:
    made = folder / "python"
    made.write_text(f"#!/bin/sh\n{script}\n")
    made.chmod(0o755)
    return str(made)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (
            "echo No module named ray >&2; exit 1",
            r"cannot run engines \(No module named ray\); install rolltree\[ray,vllm\] in",
        ),
        ("true", r"cannot run engines \(it prints nothing\)"),
        ("echo 3.9 2.60.0; echo", f"has Python and Ray 3.9 2.60.0 and the run has {OWN}; Ray needs the same"),
        (f"echo {OWN[:-1]}1; echo", f"has Python and Ray {OWN[:-1]}1 and the run has {OWN}"),
        (f"echo {OWN}; echo vllm", r"has no vllm; install rolltree\[ray,vllm\] in its environment"),
    ],
)
def test_an_interpreter_that_cannot_run_engines_is_refused_before_the_run(
    tmp_path: Path, ray_version: None, script: str, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        build_workers.check_interpreter(interpreter(tmp_path, script), "vllm")


def test_a_file_that_is_no_interpreter_is_refused(tmp_path: Path, ray_version: None) -> None:
    with pytest.raises(UserError, match=r"rollout.python = '/no/python' cannot be started .* name an interpreter"):
        build_workers.check_interpreter("/no/python", "native")
    build_workers.check_interpreter(interpreter(tmp_path, f"echo {OWN}; echo"), "native")
    with pytest.raises(UserError, match=r"install rolltree\[ray\] in its environment"):
        build_workers.check_interpreter(interpreter(tmp_path, "exit 1"), "native")


def test_vllm_is_looked_for_where_engines_run(tmp_path: Path, ray_version: None) -> None:
    """The interpreter is asked for it, not the run, whose environment may lack it."""
    asked = tmp_path / "asked"
    python = interpreter(tmp_path, f'echo "$@" > {asked}; echo {OWN}; echo')
    rollout: Any = SimpleNamespace(backend="vllm", python="", drafts=SimpleNamespace(rows=0))
    with pytest.raises(UserError, match=r"'vllm', which is not installed; install rolltree\[vllm\]"):
        build_sampling.check_backend(rollout)
    rollout.python = python
    build_sampling.check_backend(rollout)
    build_workers.check_interpreter(python, rollout.backend)
    assert asked.read_text().split()[-2:] == ["rolltree.engine", "vllm"]


def test_without_engines_it_is_refused(tmp_path: Path) -> None:
    toml = write_job(tmp_path)
    with pytest.raises(UserError, match=r"`rollout.python` is for `rollout.engines`"):
        load_config(toml, ["--rollout.python=/usr/bin/python3"])


class Thing:
    def prefix(self) -> str:
        return sys.prefix


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_engines_are_processes_of_the_interpreter_and_other_workers_are_not(ray: Any, tmp_path: Path) -> None:
    """A second environment that finds the packages of the first one."""
    from rolltree.engine.fleet.ray import RayWorkers

    venv.create(tmp_path / "second", symlinks=True)
    (site,) = (tmp_path / "second").glob("lib/python*/site-packages")
    (site / "first.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    python = str(tmp_path / "second" / "bin" / "python")
    build_workers.check_interpreter(python, "native")
    needs = {"engine": ({"CPU": 1.0}, 1), "reward": ({"CPU": 1.0}, 1)}
    workers = RayWorkers(needs, "", {"engine": python})  # type: ignore[arg-type]
    engine, other = (workers.start(role, 0, Thing) for role in ("engine", "reward"))  # type: ignore[arg-type]
    assert engine.ask("prefix").result(300) == str(tmp_path / "second")
    assert other.ask("prefix").result(300) == sys.prefix
    workers.close()
