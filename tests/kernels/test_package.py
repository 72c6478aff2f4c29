"""The package's name: transformers imports whatever `kernels` it finds, also this folder when started in a checkout."""

import os
import platform
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import setuptools
import torch
from packaging.requirements import Requirement

from rolltree.kernels import libraries

from ..support.forks import Forks

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch
from rolltree.kernels import linear_logprob
import kernels
import transformers.modeling_utils
h, w = torch.randn(4, 8), torch.randn(5, 8)
linear_logprob(h, w, torch.arange(4))
assert not hasattr(kernels, "linear_logprob")
"""


@pytest.mark.slow
def test_a_second_import_under_another_name_changes_nothing(torch_forks: Forks):
    code, said = torch_forks.run(PROGRAM, directory=ROOT)
    assert code == 0, said


def test_a_wheel_holds_every_folder_of_code():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [file.parent for top in ("engine", "kernels", "bench") for file in (ROOT / top).rglob("__init__.py")]
    found = {".".join(("rolltree", *folder.relative_to(ROOT).parts)) for folder in folders}
    assert found == set(listed)


def test_what_is_installed_is_found_before_a_clone_beside_a_script(tmp_path):
    """Tried in the folder that a clone was made in, where `rolltree` is also the name of the clone."""
    built, beside = tmp_path / "site", tmp_path / "work"
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(built)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (beside / "rolltree" / "engine").mkdir(parents=True)
    (beside / "rolltree" / "engine" / "__init__.py").write_text("raise RuntimeError('this is the clone')")
    (beside / "script.py").write_text("import rolltree.engine; print(rolltree.engine.__file__)")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=beside, env={"PYTHONPATH": str(built)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(built)


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("gpus", "asked", "built"),
    [
        ("9.0\n8.6\n9.0", None, {"86", "90a"}),
        ("9.0", "80,100", {"80", "100"}),
        (None, "90a", {"90a"}),
        (None, None, set()),
    ],
)
def test_cuda_is_built_for_the_gpus_of_the_machine(gpus, asked, built, tmp_path, monkeypatch, capsys):
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    program(programs, "nvcc", f'echo "$@" >> {calls}')
    if gpus is not None:
        program(programs, "nvidia-smi", f"printf '{gpus}\\n'")
    monkeypatch.setenv("PATH", str(programs))  # a machine's own are not found
    monkeypatch.delenv("ROLLTREE_CUDA", raising=False)
    monkeypatch.delenv("ROLLTREE_CUDA_ARCHS", raising=False)
    if asked is not None:
        monkeypatch.setenv("ROLLTREE_CUDA_ARCHS", asked)
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    parts = runpy.run_path(str(ROOT / "setup.py"))["NativeParts"](setuptools.Distribution())
    parts.build_cuda(tmp_path / "_cuda.so", tmp_path)
    compiled = calls.read_text().splitlines() if built else []
    for_each = [{word.rpartition("sm_")[2] for word in call.split() if "-gencode" in word} for call in compiled]
    sources = list((ROOT / "csrc" / "cuda").glob("*.cu"))
    assert for_each == ([built] * len(sources) + [set()] if built else [])  # the last one links
    assert calls.exists() == bool(built)
    assert ("no GPU here; ROLLTREE_CUDA_ARCHS=80,90a,100" in capsys.readouterr().err) == (not built)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
@pytest.mark.parametrize(
    ("asked", "capability", "levels"),
    [
        (None, "AVX512", ["avx512"]),
        ("native", "AVX2", ["avx2"]),
        (None, "DEFAULT", ["default"]),
        ("all", "AVX2", ["default", "avx2", "avx512"]),
    ],
)
def test_cpu_kernels_are_built_for_the_machine_unless_asked_for_all(asked, capability, levels, tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    program(tmp_path, "c++", f'echo "$@" >> {calls}')
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    libraries.log_once.cache_clear()  # on such a machine it has been said already
    for name in ("ROLLTREE_CPU_LEVEL", "ROLLTREE_WITHOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.delenv("ROLLTREE_CPU_ISA", raising=False)
    if asked is not None:
        monkeypatch.setenv("ROLLTREE_CPU_ISA", asked)
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    setup = runpy.run_path(str(ROOT / "setup.py"))
    of_another = tmp_path / "_cpu_avx999.so"
    of_another.touch()
    setup["NativeParts"](setuptools.Distribution()).build_cpu(tmp_path / "_cpu.so", tmp_path)
    made = [Path(call.split(" -o ")[1].split()[0]).name for call in calls.read_text().splitlines() if "-shared" in call]
    assert made == [f"_cpu_{level}.so" for level in levels]
    assert not of_another.exists()
    wheel = setup["Wheel"](setuptools.Distribution({"name": "rolltree", "version": "1"}))
    wheel.finalize_options()
    assert wheel.build_number == (None if asked == "all" else f"1{levels[0]}")


def test_an_instruction_set_that_is_none(monkeypatch):
    monkeypatch.setenv("ROLLTREE_CPU_ISA", "avx2")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    with pytest.raises(SystemExit, match="ROLLTREE_CPU_ISA is 'avx2'; it must be native"):
        runpy.run_path(str(ROOT / "setup.py"))["cpu_levels"]()


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (
            "import sys; sys.byteorder = 'big'",
            " is big-endian, and rolltree's compiled parts are little-endian; ",
        ),
        ("import sys; sys.maxsize = 2**31 - 1", "This Python is 32-bit, which neither torch nor rolltree's compiled "),
    ],
)
def test_setup_refuses_a_platform_in_one_sentence(there, said, tmp_path):
    """Under Python itself: what a machine is stands before anything is imported."""
    (tmp_path / "sitecustomize.py").write_text(there)
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "built")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "built").exists()


@pytest.mark.parametrize(
    ("system", "processor", "needed"),
    [
        ("Linux", "x86_64", True),
        ("Linux", "aarch64", True),
        ("Linux", "ppc64le", True),
        ("Darwin", "arm64", True),
        ("Windows", "AMD64", False),
        ("Linux", "i686", False),
        ("Linux", "s390x", False),
    ],
)
def test_a_build_that_setup_refuses_needs_no_torch(system, processor, needed):
    """Else pip says that there is no torch for this machine, or downloads it, before setup.py is asked."""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    torch_line = next(found for line in lines if (found := Requirement(line)).name == "torch")
    assert torch_line.marker.evaluate({"platform_system": system, "platform_machine": processor}) == needed


def test_kernels_for_another_machine_are_not_loaded_and_that_is_said(tmp_path, monkeypatch, caplog):
    (tmp_path / "_cpu_avx512.so").touch()
    monkeypatch.setattr(libraries, "__file__", str(tmp_path / "libraries.py"))
    libraries.log_once.cache_clear()  # on such a machine it has been said already
    for name in ("ROLLTREE_CPU_LEVEL", "ROLLTREE_WITHOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not libraries.load_library.__wrapped__("cpu")
    assert "_cpu_avx512.so is for another machine; build rolltree here, or with ROLLTREE_CPU_ISA=all." in caplog.text
