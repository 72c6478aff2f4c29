"""The modules that an import loads, and the messages where an extra is not installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

import rolltree.engine
from rolltree.engine.app.cli import EXTRAS

from ...support.forks import Forks
from ...support.tiny import ROOT

HEAVY = ("transformers", "numba", "pydantic", "pyarrow", "rich", "plotly", "jinja2", "fastapi", "pandas", "safetensors")
BLOCK = "import sys; sys.modules.update(dict.fromkeys(BLOCKED))\n"  # an import of None is a module not found


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.parametrize(("package", "others"), [("rolltree.kernels", ()), ("rolltree.engine", ("torch", "numpy"))])
def test_an_import_loads_nothing_it_does_not_need(package, others, torch_forks: Forks):
    program = f"import sys, {package}; print([m for m in {(*HEAVY, *others)!r} if m in sys.modules])"
    if "torch" in others:
        done = python(program)
        said = done.stdout + done.stderr
    else:
        _, said = torch_forks.run(program)
    assert said.strip() == "[]"


@pytest.mark.slow
def test_kernels_work_without_any_extra():
    """Torch alone: a finder that knows no numpy, too. Plans of decode attention say that they want it."""
    blocked = (
        f"BLOCKED = {HEAVY!r}\n{BLOCK}"
        "class NoNumpy:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'numpy': raise ModuleNotFoundError(name)\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'numpy' else find(name, *more)\n"
        "sys.meta_path.insert(0, NoNumpy())\n"
    )
    done = python(
        "import importlib.util\n" + blocked + "import torch\n"
        "from rolltree.kernels import DecodePlan, linear_logprob, tree_attention\n"
        "print(linear_logprob(torch.randn(4, 8), torch.randn(5, 8), torch.arange(4)).logprob.shape)\n"
        "q, none = torch.randn(5, 2, 16), torch.zeros(0, dtype=torch.int32)\n"
        "print(tree_attention(q, q, q, torch.full((5,), 5, dtype=torch.int32)).shape)\n"
        "assert 'numpy' not in sys.modules\n"
        "try:\n    DecodePlan(*[none] * 8)\nexcept ImportError as error:\n    print(error)"
    )
    assert "[4]" in done.stdout, done.stderr
    assert "[5, 2, 16]" in done.stdout, done.stderr
    assert "DecodePlan is made by numpy, which is not installed" in done.stdout, done.stderr


@pytest.mark.parametrize(("missing", "extra"), [("pydantic", "train"), ("transformers", "engine")])
def test_a_missing_extra_is_named(missing, extra, tmp_path, torch_forks: Forks):
    (tmp_path / "a.toml").write_text(
        'name = "a"\n[model]\npath = "m"\n[data]\npath = "p.jsonl"\n[reward]\nverifier = "exact"\n'
    )
    code, said = torch_forks.run(
        f"BLOCKED = {(missing,)!r}\n{BLOCK}\nfrom rolltree.engine.app.cli import main\n"
        f"sys.exit(main(['train', {str(tmp_path / 'a.toml')!r}]))"
    )
    assert code == 2, said
    assert f"This needs {missing}; install it with `pip install 'rolltree[{extra}]'`." in said


def test_every_extra_is_declared_with_its_modules():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        declared = " ".join(extras[extra]).replace("-", "_")
        assert all(module in declared for module in modules), extra


def test_public_names_are_those_declared():
    assert set(rolltree.engine.__all__) == set(rolltree.engine._HOME)
    for name in rolltree.engine.__all__:
        assert getattr(rolltree.engine, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        _ = rolltree.engine.Trainr


@pytest.mark.slow
def test_all_but_rollouts_works_without_a_compiler(torch_forks: Forks):
    code, said = torch_forks.run(
        f"BLOCKED = ('rolltree.engine.rollout.native._host',)\n{BLOCK}"
        "import rolltree.engine.rollout\n"
        "from rolltree.engine import NativeEngine, TokenTree, pack\n"
        "print(len(pack([TokenTree.from_sequences([1], [[2], [3]])], max_tokens=8)))\n"
    )
    assert (code, said.strip()) == (0, "1")
