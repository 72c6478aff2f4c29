"""``python install.py [OPTIONS] PACKAGE...``: ``pip install`` of the environment of this Python, done by uv, in a
tenth of pip's time.

uv does not read pip's settings, so those that say where packages come from are handed on; what a machine sets for uv
itself goes before.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

NAMES = {  # pip's setting -> uv's, and what stands between the values of one
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
}


def settings(listed: str) -> dict[str, str]:
    """The environment for uv that ``pip config list`` asks for."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}  # the later goes before, as in pip
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, setting = key.rpartition(".")
        if section in found and setting in NAMES:
            name, between = NAMES[setting]
            found[section][name] = between.join(ast.literal_eval(value).split())
    return found["global"] | found["install"] | found[":env:"]


def main() -> None:
    pip = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(pip, capture_output=True, text=True, check=True).stdout
    os.environ["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # the newest of all indexes, as pip does
    os.environ.update({name: value for name, value in settings(listed).items() if name not in os.environ})
    uv = str(Path(sys.executable).with_name("uv"))
    os.execv(uv, [uv, "pip", "install", "--quiet", *sys.argv[1:]])


if __name__ == "__main__":
    main()
