"""A script: runs a command where a directory has the path that it is told, in a namespace of mounts.

    python mounted.py FOLDER HIDDEN PLACE COMMAND...

The command's root has all that the real one has, and at ``PLACE`` the directory ``FOLDER/episode``; the directory
``HIDDEN`` is empty there. Without the privilege to mount, it is in a namespace of users too, in which its user has the
same number. Nothing else is contained. The namespace and its mounts end with the last process in it.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from types import ModuleType
from typing import NoReturn

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_SLAVE = 2, 4, 4096, 16384, 1 << 19
UNABLE, NO_COMMAND = 125, 127
"""Exit codes where there is no such namespace, and no such command."""


def main(folder: str, hidden: str, place: str, *words: str) -> NoReturn:
    try:
        _enter(_filters(), folder, hidden, place)
        os.chdir(f"{place}/work")
    except OSError as error:
        print(error.strerror or error, file=sys.stderr)
        sys.exit(UNABLE)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and so would what it becomes
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(NO_COMMAND)


def _enter(filters: ModuleType, folder: str, hidden: str, place: str) -> None:
    """Enter the namespace.

    Raises:
        OSError: the kernel refuses it, or ``place`` exists on this system.
    """
    if os.path.lexists(place):
        raise OSError(0, f"there is a '{place}' already")
    user, group = os.geteuid(), os.getegid()
    if filters.libc.unshare(CLONE_NEWNS) != 0:
        filters.check(filters.libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "unshare")
        for name, text in (("setgroups", "deny"), ("gid_map", f"{group} {group} 1"), ("uid_map", f"{user} {user} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    filters.mount(None, "/", None, MS_REC | MS_SLAVE)
    root = f"{folder}/root"
    filters.mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for entry in os.scandir("/"):
        there = root + entry.path
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), there)
            continue
        if entry.is_dir():
            os.mkdir(there)
        else:
            os.close(os.open(there, os.O_CREAT | os.O_WRONLY, 0o600))
        filters.mount(entry.path, there, None, MS_BIND | MS_REC)
    os.mkdir(root + place)
    filters.mount(f"{folder}/episode", root + place, None, MS_BIND)
    filters.mount("tmpfs", root + os.path.realpath(hidden), "tmpfs", MS_NOSUID | MS_NODEV, "size=4k,mode=755")
    filters.enter_root(root)


def _filters() -> ModuleType:
    """Return the module beside this file that makes system calls, without its package."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "filters.py")
    spec = importlib.util.spec_from_file_location("rolltree_filters", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(*sys.argv[1:])
