"""A script: the process that runs untrusted Python, one program after the other, each in a contained child.

`Sandbox` starts it and exchanges messages with it over a socket: a length, then JSON. If the kernel permits, the jail
runs in new namespaces: it is process 1 of its process tree and sees no other processes; there is no network; its root
has the interpreter's libraries, read-only, and an empty /tmp in memory, new for every program. When a program ends,
the jail kills all other processes there. Otherwise it runs without namespaces: its children may not start processes,
and Landlock restricts them to a temporary directory, in which they may not make directories. In both cases system
calls are filtered and resources limited, and a child has no environment and no file descriptors except its input and
output. Integers of programs have any number of digits as texts.

When the socket is closed, for whatever reason, the jail and everything in it end.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from types import ModuleType
from typing import Any, NoReturn

LENGTH = struct.Struct("!Q")
LOOK_S = 0.01
"""Seconds between checks of the time, the memory and the number of processes."""
MARK_FD = 63
"""File descriptor on which a child reports how its program ended."""
PACKAGES = "/packages"
"""Directory in the namespaces of installed packages that programs may import, wherever they are outside."""
INNER = 1000
"""User id of programs inside the namespaces."""

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000  # user mount pid net ipc uts
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY = 442, -100, 0x8000, 1 | 2 | 4  # read-only, nosuid, nodev

filters: Any = None
program: Any = None
libc: Any = None


def main(fd: int) -> None:
    global filters, program, libc
    sys.set_int_max_str_digits(0)  # of programs too, whose time is limited
    filters, program = _module("filters"), _module("program")
    libc = filters.libc
    control = socket.socket(fileno=fd)
    setup = receive(control)
    try:
        jail = Namespaces(control, setup) if setup["namespaces"] else Filters(setup)
    except OSError as error:
        send(control, {"failed": str(error.strerror or error)})
        return
    send(control, {"ready": jail.words})
    while True:
        try:
            request = receive(control)
        except EOFError:
            jail.end()
        send(control, Run(jail, control, request).answer())


def _module(name: str) -> ModuleType:
    """Return a module beside this file, which runs without packages."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"rolltree_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def receive(control: socket.socket) -> Any:
    """Return the next message.

    Raises:
        EOFError: the socket has been closed.
    """
    content = b""
    for fixed_size in (LENGTH.size, None):
        size = LENGTH.unpack(content)[0] if fixed_size is None else fixed_size
        content = b""
        while len(content) < size:
            chunk = control.recv(min(1 << 20, size - len(content)))
            if not chunk:
                raise EOFError
            content += chunk
    return json.loads(content)


def send(control: socket.socket, message: Any) -> None:
    content = json.dumps(message).encode()
    with contextlib.suppress(OSError):  # the socket has been closed: the next `receive` raises
        control.sendall(LENGTH.pack(len(content)) + content)


class Namespaces:
    """Containment by namespaces: the jail becomes process 1 of a new process tree, in a new root.

    Raises:
        OSError: the kernel refuses one of the namespaces or mounts.
    """

    words = "namespaces of its own (processes, network, files, users), a filter of system calls, and resource limits"
    alone = False

    def __init__(self, control: socket.socket, setup: dict[str, Any]) -> None:
        self.files = f"size={setup['files_mb']}m,nr_inodes=4096,mode=1777"
        self.directory = "/tmp"
        with contextlib.suppress(OSError):
            os.setgroups([])
        filters.check(libc.unshare(NAMESPACES), "unshare")
        send(control, {"map": os.getpid()})
        self.mapped = receive(control)["mapped"]  # whether a second user is mapped
        if child := os.fork():
            control.close()
            os.waitpid(child, 0)
            os._exit(0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._new_root(setup["root"], setup["packages"])
        if setup["packages"]:
            sys.path.append(PACKAGES)
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)

    def _new_root(self, root: str, packages: list[str]) -> None:
        filters.mount(None, "/", None, MS_REC | MS_PRIVATE)
        filters.mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
        places = {path: root + path for path in libraries()}
        places |= {path: f"{root}{PACKAGES}/{os.path.basename(path)}" for path in packages}
        for path, place in places.items():
            os.makedirs(os.path.dirname(place), exist_ok=True)
            if os.path.islink(path):
                os.symlink(os.readlink(path), place)
                continue
            os.makedirs(place)
            filters.mount(path, place, None, MS_BIND | MS_REC)
            self._read_only(place, AT_RECURSIVE)
        os.makedirs(f"{root}/dev")
        for name in ("null", "zero", "urandom", "random"):
            place = f"{root}/dev/{name}"
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o666))
            filters.mount(f"/dev/{name}", place, None, MS_BIND)
        for name in ("tmp", "proc"):
            os.makedirs(f"{root}/{name}")
        filters.mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        self.proc = os.open(f"{root}/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        filters.check(libc.umount2(f"{root}/proc".encode(), filters.MNT_DETACH), "umount")  # programs must not see it
        self._read_only(root, 0)
        filters.enter_root(root)
        filters.mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, self.files)

    def _read_only(self, place: str, flags: int) -> None:
        attributes = struct.pack("QQQQ", ATTR_RDONLY if flags else 1, 0, 0, 0)
        size = ctypes.c_size_t(len(attributes))
        result = libc.syscall(MOUNT_SETATTR, AT_FDCWD, place.encode(), flags, attributes, size)
        filters.check(result, f"mount_setattr {place}")

    def enter(self) -> None:
        """Give up all privileges; called in a child before it runs a program."""
        if self.mapped:
            os.setresgid(INNER, INNER, INNER)
            os.setresuid(INNER, INNER, INNER)
        filters.drop_capabilities()
        filters.filter_calls(alone=False)

    def kill_all(self, child: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)

    def clear(self) -> None:
        """Delete the files of a program."""
        filters.check(libc.umount2(b"/tmp", filters.MNT_DETACH), "umount")
        filters.mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, self.files)

    def end(self) -> NoReturn:
        os._exit(0)

    def processes(self, child: int) -> list[int]:
        return [int(name) for name in os.listdir(self.proc) if name.isdigit() and name != "1"]


class Filters:
    """Containment without namespaces: a child may not start processes and has one temporary directory.

    Raises:
        OSError: the kernel accepts no filter of system calls.
    """

    alone = True

    def __init__(self, setup: dict[str, Any]) -> None:
        if not filters.available():
            raise OSError(0, "there is no filter of system calls for this system")
        self.directory = setup["root"]
        self.landlock = setup["landlock"] and filters.landlock_version() > 0
        self.words = "a filter of system calls (no network, no processes, no directories), resource limits, and " + (
            "Landlock (no files but its own)" if self.landlock else "no protection of the user's files"
        )
        self.proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def enter(self) -> None:
        filters.drop_capabilities()
        if self.landlock:
            filters.restrict_files([path for path in libraries() if not os.path.islink(path)], self.directory)
        filters.filter_calls(alone=True)

    def kill_all(self, child: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    def clear(self) -> None:
        os.chmod(self.directory, 0o700)
        for name in os.listdir(self.directory):
            os.unlink(os.path.join(self.directory, name))

    def end(self) -> NoReturn:
        self.clear()
        with contextlib.suppress(OSError):
            os.rmdir(self.directory)
        os._exit(0)

    def processes(self, child: int) -> list[int]:
        return [child]


def libraries() -> list[str]:
    """Return the directories that the interpreter reads while it runs: modules and shared libraries."""
    folders = [path for path in sys.path if os.path.isdir(path)]
    folders += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", os.path.join(sys.base_prefix, "lib")]
    kept: list[str] = []
    for path in sorted({os.path.normpath(path) for path in folders if os.path.isdir(path)}, key=len):
        if not any(path == other or path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return kept


class Run:
    """One program, from its start until all its processes and files are gone."""

    def __init__(self, jail: Namespaces | Filters, control: socket.socket, request: dict[str, Any]) -> None:
        self.jail, self.control, self.request, self.limits = jail, control, request, request["limits"]
        self.token = os.urandom(16)
        self.status: str | None = None
        self.seen = {"out": bytearray(), "error": bytearray(), "mark": bytearray()}

    def answer(self) -> dict[str, Any]:
        begin = time.monotonic()
        stdin = os.memfd_create("stdin", os.MFD_ALLOW_SEALING)
        os.write(stdin, self.request["stdin"].encode("utf-8", "surrogateescape"))
        os.lseek(stdin, 0, os.SEEK_SET)
        pipes = {name: os.pipe() for name in self.seen}
        child = os.fork()
        if child == 0:
            try:
                self._become([stdin, pipes["out"][1], pipes["error"][1]], pipes["mark"][1])
                program.execute(self.request["code"], self.request["then"], MARK_FD, self.token)
            finally:
                os._exit(70)
        os.close(stdin)
        for _, write in pipes.values():
            os.close(write)
        ended = self._watch(child, {pipes[name][0]: name for name in pipes}, begin + self.limits["wall_s"])
        for read, _ in pipes.values():
            os.close(read)
        self.jail.clear()
        return {
            "status": self.status or self._verdict(ended),
            "stdout": self.seen["out"].decode("utf-8", "replace"),
            "stderr": self.seen["error"].decode("utf-8", "replace"),
            "seconds": time.monotonic() - begin,
        }

    def _verdict(self, ended: int) -> str:
        mark = bytes(self.seen["mark"])
        if os.WIFSIGNALED(ended):
            return "timeout" if os.WTERMSIG(ended) == signal.SIGXCPU else "killed"
        if mark.startswith(self.token):
            return mark[len(self.token) :].decode("ascii", "replace")
        return "exited" if os.WEXITSTATUS(ended) == 0 else "error"

    def _become(self, streams: list[int], mark: int) -> None:
        """Keep only the streams, set the limits, and enter the containment; called in the child."""
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        high = [os.dup(fd) for fd in [*streams, mark] if fd >= 0]
        while min(high) <= MARK_FD:
            high = [os.dup(fd) for fd in high]
        for place, fd in zip((0, 1, 2, MARK_FD), high, strict=True):
            os.dup2(fd, place, inheritable=place != MARK_FD)
        os.closerange(3, MARK_FD)
        os.closerange(MARK_FD + 1, max(high) + 64)
        os.chdir(self.jail.directory)
        os.umask(0o077)
        limits, megabyte = self.limits, 1 << 20
        cpu = max(1, round(limits["cpu_s"] + 0.5))
        hard = {
            resource.RLIMIT_AS: limits["memory_mb"] * megabyte,
            resource.RLIMIT_CPU: cpu + 1,
            resource.RLIMIT_FSIZE: limits["files_mb"] * megabyte,
            resource.RLIMIT_NOFILE: MARK_FD + 1,
            resource.RLIMIT_NPROC: limits["processes"] + 2,  # the jail may be of the same user
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        }
        if self.jail.alone:
            del hard[resource.RLIMIT_NPROC]  # it counts all of the user's processes; the filter forbids new ones
        os.environ.clear()
        self.jail.enter()
        for which, most in hard.items():
            if (old := resource.getrlimit(which)[1]) >= 0:
                most = min(most, old)
            resource.setrlimit(which, (min(cpu, most) if which == resource.RLIMIT_CPU else most, most))

    def _watch(self, child: int, pipes: dict[int, str], deadline: float) -> int:
        """Read the child's output and enforce its limits. Returns its wait status, when all its processes are gone."""
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        for fd in pipes:
            os.set_blocking(fd, False)
            poll.register(fd, select.POLLIN)
        ended: int | None = None
        while True:
            ready = [fd for fd, _ in poll.poll(0 if ended is not None else 1000 * LOOK_S)]
            if self.control.fileno() in ready:  # no message is sent while a program runs: the socket was closed
                self.jail.kill_all(child)
                self.jail.end()
            busy = [fd for fd in ready if self._read(fd, pipes[fd], poll)]
            if ended is not None:
                if not busy:
                    return ended
                continue
            self.status = self.status or self._beyond(child, deadline)
            if self.status is not None:
                self.jail.kill_all(child)
            ended = self._reap(child)

    def _read(self, fd: int, name: str, poll: Any) -> bool:
        """Read what is available, up to the limit of output. Returns whether there may be more to keep."""
        try:
            content = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not content:
            poll.unregister(fd)
            return False
        room = self.limits["output_kb"] * 1024 - len(self.seen[name])
        self.seen[name] += content[: max(room, 0)]
        if len(content) > room:
            self.status = self.status or "output"
        return len(content) <= room

    def _beyond(self, child: int, deadline: float) -> str | None:
        """Return the limit that the program has exceeded, if any."""
        if time.monotonic() >= deadline:
            return "timeout"
        processes = self.jail.processes(child)
        if len(processes) > self.limits["processes"]:
            return "processes"
        resident = 0
        for pid in processes:
            with contextlib.suppress(OSError):
                fd = os.open(f"{pid}/statm", os.O_RDONLY, dir_fd=self.jail.proc)
                resident += int(os.read(fd, 200).split()[1]) * resource.getpagesize()
                os.close(fd)
        return "memory" if resident > self.limits["memory_mb"] << 20 else None

    def _reap(self, child: int) -> int | None:
        """Reap ended processes. Returns the program's wait status once it has ended, after killing all it started."""
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == 0:
            if not self.jail.alone:
                with contextlib.suppress(ChildProcessError):
                    # orphans become children of the jail, and count as processes until they are reaped
                    while (orphan := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                        if orphan.si_pid == child:
                            break
                        os.waitpid(orphan.si_pid, 0)
            return None
        while not self.jail.alone:
            self.jail.kill_all(child)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
        return status


if __name__ == "__main__":
    main(int(sys.argv[1]))
