"""The package's name: transformers imports whatever `kernels` it finds, also this folder when started in a checkout."""

import subprocess
import sys
import tomllib
from pathlib import Path

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


def test_a_second_import_under_another_name_changes_nothing():
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
