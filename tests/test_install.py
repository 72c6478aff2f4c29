"""install.py: uv looks for packages where pip is told to look."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

INSTALL = runpy.run_path(str(Path(__file__).parents[1] / "install.py"))


@pytest.mark.check
def test_settings_of_pip_are_those_of_uv(tmp_path: Path) -> None:
    """Several values of one; a command's before the rest of a file's, the environment's before both."""
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://a/simple\nextra-index-url =\n  https://b/simple\n  file:///c\nno-color = true\n"
        "find-links = /h\n[install]\nfind-links = /d\n  /e\n[download]\ntrusted-host = i\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": str(config), "PIP_INDEX_URL": "https://f/simple", "PIP_CERT": "/g.pem"}
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], env=environment, capture_output=True, text=True, check=True
    )
    found = INSTALL["settings"](listed.stdout)
    assert (
        found.items()
        >= {
            "UV_DEFAULT_INDEX": "https://f/simple",
            "UV_INDEX": "https://b/simple file:///c",
            "UV_FIND_LINKS": "/d,/e",
            "SSL_CERT_FILE": "/g.pem",
        }.items()
    )
    assert set(found) <= {name for name, _ in INSTALL["NAMES"].values()}
    assert found.get("UV_INSECURE_HOST") != "i"
