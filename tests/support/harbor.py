"""Ten small tasks in Harbor's format, the image that they work in, and the engine of containers that tests use."""

from __future__ import annotations

import functools
import io
import os
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENGINE = os.environ.get("ROLLTREE_CONTAINERS", "podman --cgroup-manager=cgroupfs --runtime runc").split()
"""Podman where there is no systemd, which it asks for control groups by default; another one by ROLLTREE_CONTAINERS."""
ARGS = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"]
OPTIONS: dict[str, Any] = {"engine": ENGINE, "engine_args": ARGS, "network": "none"}
IMAGE = "localhost/rolltree-tests:1"
BUSYBOX = "docker.io/library/busybox:1.37"
"""The image of examples/harbor_tasks."""
FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n",
    "etc/group": "root:x:0:\nagent:x:1000:\n",
    "app/add.sh": "echo $(($1 - $2))\n",
    "app/run.sh": "echo running\n",
    "app/words.txt": "pear\napple\nfig\ncherry\n",
    "app/old name.txt": "kept\n",
    "app/empty/a": "",
    "app/empty/b": "full",
    "srv/a/1/notes": "a heron\n",
    "srv/b/2/notes": "a pelican\n",
}
FOLDERS = {"app": 0o777, "tmp": 0o1777, "root": 0o700, "home/agent": 0o777, "var": 0o755, "proc": 0o755, "sys": 0o755}


@dataclass(frozen=True)
class Written:
    """A task: what it asks for, the command that does it, and the condition that its tests check."""

    instruction: str
    solution: str
    condition: str
    toml: str = ""
    dockerfile: str = ""


TASKS = {
    "mend-test": Written(
        "add.sh prints a wrong sum. Mend it.", "sed -i 's/-/+/' add.sh", '[ "$(sh /app/add.sh 2 3)" = 5 ]'
    ),
    "find-file": Written(
        "Write the path of the file below /srv that tells of a pelican to answer.txt.",
        "grep -rl pelican /srv > answer.txt", '[ "$(cat /app/answer.txt)" = /srv/b/2/notes ]',
    ),
    "set-permission": Written(
        "Let the owner alone read, write and run run.sh.", "chmod 700 run.sh", '[ "$(stat -c %a /app/run.sh)" = 700 ]'
    ),
    "count-lines": Written(
        "Write the number of lines of words.txt to count.txt.", "wc -l < words.txt > count.txt",
        '[ "$(cat /app/count.txt)" = 4 ]',
    ),
    "make-link": Written(
        "Make a link `current` to /srv/b.", "ln -s /srv/b current", '[ "$(readlink /app/current)" = /srv/b ]'
    ),
    "sort-words": Written(
        "Sort words.txt.", "sort -o words.txt words.txt", '[ "$(head -n 1 /app/words.txt)" = apple ]'
    ),
    "rename": Written(
        "Rename `old name.txt` to new.txt.", "mv 'old name.txt' new.txt", '[ "$(cat /app/new.txt)" = kept ]'
    ),
    "delete-empty": Written(
        "Delete the empty files in `empty`.", "find empty -type f -empty -exec rm {} +", '[ "$(ls /app/empty)" = b ]'
    ),
    "as-user": Written(
        "Write your user's name to who.txt.", "id -un > who.txt",
        '[ "$(cat /app/who.txt)" = agent ] && [ "$(stat -c %U /app/who.txt)" = agent ] && [ "$(id -u)" = 0 ]',
        'user = "agent"\n[verifier]\nuser = "root"\n',
    ),
    "built": Written(
        "Write what /data/given holds to out.txt.", "cat /data/given > out.txt", '[ "$(cat /app/out.txt)" = 17 ]',
        dockerfile=f"FROM {IMAGE}\nCOPY given /data/given\nRUN echo built > /data/by && rm -rf /data/none\n",
    ),
}  # fmt: skip


def write_task(
    folder: Path, name: str = "task", *, toml: str | None = None, test: str | None = None, **files: str
) -> Path:
    """Write a task of its own, or one of `TASKS`, and return its folder.

    Args:
        toml: its ``task.toml``.
        test: its ``tests/test.sh``.
        files: further ones by their paths, ``__`` for a slash and ``_dot_`` for a full stop.
    """
    given = TASKS.get(name, Written("Do it.", "true", "true"))
    limits = "[environment]\nmemory_mb = 256\ncpus = 1\nnetwork_mode = 'no-network'\n"
    image = "" if given.dockerfile else f'docker_image = "{IMAGE}"\n'
    content = {
        "task.toml": toml if toml is not None else f"{limits}{image}[agent]\ntimeout_sec = 60\n{given.toml}",
        "instruction.md": f"<!-- a canary -->\n{given.instruction}\n",
        "tests/test.sh": test
        or f"#!/bin/sh\nif {given.condition}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
        "tests/hidden.txt": SECRET,
        "solution/solve.sh": f"# {SECRET}\n{given.solution}\n",
    }
    if given.dockerfile:
        content |= {"environment/Dockerfile": given.dockerfile, "environment/given": "17"}
    for path, text in (
        content | {key.replace("__", "/").replace("_dot_", "."): text for key, text in files.items()}
    ).items():
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_text(text)
    return folder / name


SECRET = "a-secret-of-the-tests"


def write_tasks(folder: Path) -> Path:
    """Write all of `TASKS` below a folder."""
    for name in TASKS:
        write_task(folder, name)
    return folder


@functools.cache
def no_podman() -> str:
    """Return why this machine runs no container by podman, and make the image; empty where it does."""
    if missing := [name for name in (ENGINE[0], "runc", "busybox") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} not installed: apt-get install podman runc busybox-static"
    if subprocess.run([*ENGINE, "image", "inspect", IMAGE], capture_output=True, check=False).returncode:
        made = subprocess.run(
            [*ENGINE, "import", "--change", "WORKDIR /app", "-", IMAGE], input=_root(), capture_output=True, check=False
        )
        if made.returncode:
            return f"{ENGINE[0]} imports no image: {made.stderr.decode()[-200:]}"
    if subprocess.run([*ENGINE, "image", "inspect", BUSYBOX], capture_output=True, check=False).returncode:
        subprocess.run([*ENGINE, "tag", IMAGE, BUSYBOX], check=True)  # the same programs, and no registry
    words = [*ENGINE, "run", "--rm", "--network", "none", *ARGS, IMAGE, "true"]
    tried = subprocess.run(words, capture_output=True, text=True, check=False)
    return f"{ENGINE[0]} starts no container: {tried.stderr[-200:]}" if tried.returncode else ""


def _root() -> bytes:
    """Return a tar file with busybox, its commands as links, and some files."""
    packed = io.BytesIO()
    busybox = str(shutil.which("busybox"))
    names = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for folder, mode in FOLDERS.items():
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)
        tar.add(os.path.realpath(busybox), "bin/busybox")
        for name in names:
            if name not in ("busybox", "bash"):
                entry = tarfile.TarInfo(f"bin/{name}")
                entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(entry)
        for path, text in FILES.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(text), 0o666
            tar.addfile(entry, io.BytesIO(text.encode()))
    return packed.getvalue()


def containers(label: str = "rolltree.owner") -> list[str]:
    """Return the containers on this machine with a label."""
    words = [*ENGINE, "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={label}"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
