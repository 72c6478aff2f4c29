"""``import rolltree.engine`` registers the attention with Transformers, whichever is imported first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ...support.forks import Forks

CHECK = """
from transformers import Qwen3Config, Qwen3ForCausalLM
import torch
sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
             num_key_value_heads=1, head_dim=8)
model = Qwen3ForCausalLM._from_config(Qwen3Config(**sizes), attn_implementation="rolltree")
print(model(torch.tensor([[1, 2, 3]])).logits.shape)
"""


def python(program: str, *, path: Path | None = None, forked: Forks | None = None) -> str:
    """Return what the program prints in a new process, or in one that has imported torch."""
    program = ("" if path is None else f"import sys; sys.path.insert(0, {str(path)!r})\n") + program
    if forked is not None:
        code, said = forked.run(program)
    else:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        code, said = done.returncode, done.stdout + done.stderr
    assert code == 0, said
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import rolltree.engine",  # and Transformers afterwards
        ("import transformers.modeling_utils, rolltree.engine"),
        ("import transformers, rolltree.engine, transformers.masking_utils"),
    ],
)
def test_a_model_is_made_with_it_in_every_order(imports: str, torch_forks: Forks) -> None:
    assert "torch.Size([1, 3, 9])" in python(imports + CHECK, forked=torch_forks)


THREADS = """
import importlib, sys, threading
first, second = FIRST, SECOND
go = threading.Barrier(2)
def run(names):
    go.wait()
    for name in names:
        importlib.import_module(name)
threads = [threading.Thread(target=run, args=(names,)) for names in (first, second)]
[t.start() for t in threads]; [t.join(120) for t in threads]
assert not any(t.is_alive() for t in threads)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "second",
    ["rolltree.engine", "rolltree.engine.integrations.transformers"],
)
def test_imports_in_two_threads_neither_hang_nor_miss_it(second: str, torch_forks: Forks) -> None:
    program = THREADS.replace("FIRST", "['transformers.modeling_utils']").replace("SECOND", f"[{second!r}]")
    assert "torch.Size([1, 3, 9])" in python(program + CHECK, forked=torch_forks)


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A package that calls itself transformers, and a module that writes when it is imported."""
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "modeling_utils.py").write_text("import os\nif os.environ.get('FAIL'): raise OSError('no')\nvalue = 3\n")
    (tmp_path / "fake_attention.py").write_text(
        "import sys; assert sys.modules['transformers.modeling_utils'].value == 3; print('registered')\n"
    )
    return tmp_path


FAKE = "import rolltree.engine.registration as r; r.ATTENTION = 'fake_attention'\n"


def test_nothing_is_imported_for_it_where_nobody_imports_transformers(stub: Path) -> None:
    assert "registered" not in python(FAKE + "import transformers", path=stub)
    assert python(FAKE + "import sys; print('transformers' in sys.modules, 'torch' in sys.modules)") == "False False\n"


def test_the_module_is_what_it_would_be_without(stub: Path) -> None:
    program = "import inspect, transformers.modeling_utils as m\nprint(m.value, type(m.__loader__).__name__, "
    program += "m.__spec__.loader is m.__loader__, 'value = 3' in inspect.getsource(m), m.__file__)"
    with_it = python(FAKE + program, path=stub)
    assert with_it.splitlines() == ["registered", *python(program, path=stub).splitlines()]


def test_an_import_that_failed_registers_when_it_is_tried_again(stub: Path) -> None:
    program = "import os; os.environ['FAIL'] = '1'\ntry:\n    import transformers.modeling_utils\n"
    program += (
        "except OSError as error: print('failed:', error)\ndel os.environ['FAIL']; import transformers.modeling_utils"
    )
    assert python(FAKE + program, path=stub).split("\n")[:2] == ["failed: no", "registered"]


@pytest.mark.parametrize("program", ["import rolltree.engine, transformers.modeling_utils",
                                     "import transformers.modeling_utils, rolltree.engine"])  # fmt: skip
def test_a_transformers_without_a_register_is_imported_with_a_warning(
    stub: Path, program: str, torch_forks: Forks
) -> None:
    said = python(program + "; print(transformers.modeling_utils.value)", path=stub, forked=torch_forks)
    assert "3" in said.splitlines()
    assert said.count("attn_implementation='rolltree' could not be registered with Transformers (") == 1
    assert "Traceback" not in said


def test_other_finders_are_asked_and_other_modules_left_alone(stub: Path) -> None:
    program = """
import sys, importlib.machinery
class Last(importlib.machinery.PathFinder): pass
sys.meta_path[:] = [f for f in sys.meta_path if not f is importlib.machinery.PathFinder] + [Last]
import transformers.modeling_utils, json.tool
try:
    import transformers.none
except ModuleNotFoundError as error: print(error.name)
"""
    assert python(FAKE + program, path=stub) == "registered\ntransformers.none\n"
