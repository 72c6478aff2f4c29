"""Programs that want out, in namespaces and without: each is contained and leaves nothing behind; the next one runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolltree.engine.sandbox import Limits, Sandbox, Sandboxes

LIMITS = Limits(wall_s=0.5, cpu_s=1.0, memory_mb=200, processes=8, output_kb=16, files_mb=4)


def require_namespaces() -> None:
    """Skip the test where the kernel gives no namespaces, or ROLLTREE_SANDBOX_WITHOUT takes them away."""
    with Sandbox(LIMITS) as made:
        if not made.namespaces:
            pytest.skip(f"this kernel gives no namespaces: {made.containment}")


@pytest.fixture(scope="module", params=["namespaces", "filters"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    wanted = request.param == "namespaces"
    if wanted:
        require_namespaces()
    with Sandbox(LIMITS, namespaces=wanted) as made:
        yield made
    assert not left_over(made)


def left_over(sandbox: Sandbox) -> list[str]:
    """Processes that began in the sandbox, and its directory."""
    found = [path for path in (sandbox._root,) if os.path.exists(path)]
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"jail.py" in entry.read_bytes() and sandbox._process is None:
                status = (entry.parent / "stat").read_text().rpartition(")")[2].split()
                found += [str(entry)] if status[0] != "Z" and int(status[1]) == 1 else []
        except OSError:
            continue
    return found


HOSTILE = {
    "fork_bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "thread_bomb": "import threading as t, time\nfor _ in range(9999): t.Thread(target=time.sleep, args=(60,)).start()",
    "allocate": "x = bytearray(10 << 30)",
    "allocate_slowly": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "loop": "while True: pass",
    "regular_expression": "import re\nre.match('(a+)+b', 'a' * 64)",
    "sleep": "import time\ntime.sleep(600)",
    "ignore": "import signal as s\nfor n in set(s.Signals) - {9, 19}: s.signal(n, s.SIG_IGN)\nwhile True: pass",
    "print": "while True: print('x' * 4000)",
    "print_error": "import os\nwhile True: os.write(2, b'x' * 4000)",
    "fill": "f = open('big', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "recurse": "def f(): f()\nimport sys\nsys.setrecursionlimit(10**9)\nf()",
    "segfault": "import ctypes\nctypes.string_at(0)",
    "stop": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "deep": "import os\nwhile True:\n    os.mkdir('d'); os.chdir('d')",
    "no_rights": "import os\nos.mkdir('d'); open('d/f', 'w').close(); os.chmod('d', 0)\nwhile True: pass",
    "parse": "(" * 100000,
    "nulls": "print('a\0b')",
    "compile": "exec('a' + '.a' * 1000000)",
}


@pytest.mark.check(but=12)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_end_and_the_next_one_runs(sandbox: Sandbox, name: str) -> None:
    begin = time.monotonic()
    run = sandbox.run(HOSTILE[name])
    assert run.status in ("error", "timeout", "memory", "processes", "output", "killed", "syntax"), run
    assert time.monotonic() - begin < 15  # half a second of its own; how long the machine takes is not the point
    assert len(run.stdout) <= 16 * 1024
    assert len(run.stderr) <= 16 * 1024
    after = sandbox.run("import os\nprint(os.listdir('.'), 1 + 1)")
    assert (after.status, after.stdout) == ("ok", "[] 2\n")


LIBC = """
import ctypes, os
l = ctypes.CDLL(None, use_errno=True)
def need(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
"""
REFUSED = {
    "network": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)",
    "network_6": "import socket\nsocket.socket(socket.AF_INET6)",
    "unix": "import socket\nsocket.socket(socket.AF_UNIX)",
    "passwords": "open('/etc/passwd').read()",
    "home": "open(HOME).read()",
    "list_home": "import os\nos.listdir(os.path.dirname(HOME))",
    "write_home": "open(HOME, 'a').write('x')",
    "write_outside": "open('/usr/lib/rolltree', 'w')",
    "write_root": "open('/written', 'w')",
    "write_tmp": "open(TMP + '/written', 'w')",
    "environment_of_others": "open(f'/proc/{PID}/environ').read()",
    "memory_of_others": "open(f'/proc/{PID}/mem', 'rb').read()",
    "kill_run": "import os\nos.kill(PID, 9)",
    "kill_parent": "import os\nif os.getppid() == 1: raise PermissionError\nos.kill(os.getppid(), 9)",
    "kill_all": "import os\nif os.getpid() > 2: os.kill(-1, 9)\nraise PermissionError",
    "ptrace": LIBC + "need(l.ptrace(16, os.getppid(), 0, 0))",
    "mount": LIBC + "need(l.mount(b'none', b'/tmp', b'tmpfs', 0, None))",
    "user_namespace": LIBC + "need(l.unshare(0x10000000))",
    "uncounted_memory": "import os\nos.memfd_create('a')",
    "become_root": "import os\nos.setuid(0 if os.getuid() else 1)",
    "execute": "import os\nos.execv('/bin/sh', ['sh', '-c', 'true'])",
    "chroot": "import os\nos.chroot('/')",
    "raise_limits": "import resource as r\nr.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_outside_cannot_be_reached(sandbox: Sandbox, name: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = f"PORT, HOME, PID, TMP = {server.getsockname()[1]}, {str(secret)!r}, {os.getpid()}, {str(tmp_path)!r}\n"
        run = sandbox.run(names + REFUSED[name])
    assert run.status == "error", run
    kind = run.stderr.splitlines()[-1].partition(":")[0]
    assert kind in ("PermissionError", "FileNotFoundError", "OSError", "ProcessLookupError", "ValueError"), run.stderr
    assert secret.read_text() == "secret"
    assert not (tmp_path / "written").exists()
    assert "secret" not in run.stdout


def test_nothing_is_inherited(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    code = (
        "import os\nprint(dict(os.environ))\nheld = []\nfor fd in range(64):\n    try: os.fstat(fd); held.append(fd)\n"
        "    except OSError: pass\nprint(held)"
    )
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    run = sandbox.run(code)
    os.close(reader)
    os.close(writer)
    assert run.stdout == "{}\n[0, 1, 2, 63]\n"  # the last says that the end was reached


DAEMON = """
import os, signal, time
for s in (signal.SIGTERM, signal.SIGHUP): signal.signal(s, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(MARK)
    os._exit(0)
os.wait()
print("gone")
"""


def test_a_daemon_ends_with_its_program() -> None:
    mark = f"6{os.getpid()}"
    with Sandbox(LIMITS) as sandbox:
        if not sandbox.containment.startswith("namespaces"):
            pytest.skip(f"this kernel gives no namespaces: {sandbox.containment}")
        run = sandbox.run(DAEMON.replace("MARK", mark))
        assert (run.status, run.stdout) == ("ok", "gone\n")
        assert sandbox._process is not None
        tree = below(sandbox._process.pid)
        assert len(tree) == 1  # process 1 of its namespace, waiting for the next program


def below(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, more = [], [pid]
    while more:
        more = [child for child, parent in parents.items() if parent in more]
        found += more
    return found


@pytest.mark.parametrize("namespaces", [True, False])
def test_everything_ends_with_the_run(namespaces: bool, tmp_path: Path) -> None:
    if namespaces:
        require_namespaces()
    program = (
        "from rolltree.engine.sandbox import Sandbox, Limits\n"
        f"s = Sandbox(Limits(wall_s=60), namespaces={namespaces})\n"
        'print(s._process.pid, flush=True)\ns.run(\'import time\\nopen("left", "w")\\ntime.sleep(60)\')'
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        jail = int(run.stdout.readline())
        time.sleep(0.5)
        found = [jail, *below(jail)]
        run.kill()
    assert len(found) == (3 if namespaces else 2)
    deadline = time.monotonic() + 10
    while (still := [pid for pid in found if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not still
    assert list(tmp_path.iterdir()) == []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_how_a_program_ended(sandbox: Sandbox) -> None:
    def run(code: str, then: str = "", stdin: str = "") -> tuple[str, str]:
        found = sandbox.run(code, then=then, stdin=stdin)
        return found.status, found.stdout

    assert run("print(input()[::-1])", stdin="abc\n") == ("ok", "cba\n")
    assert run("import sys\nprint(sys.stdin.read() == 'é\\n' * 100000)", stdin="é\n" * 100000) == ("ok", "True\n")
    assert run("print(1)\nraise SystemExit") == ("exited", "1\n")
    assert run("print(1)\nimport os, sys\nsys.stdout.flush()\nos._exit(0)") == ("exited", "1\n")
    assert run("print(1)\n1 / 0") == ("error", "1\n")
    assert run("raise SystemExit(2)") == ("error", "")
    assert run("def f(:") == ("syntax", "")
    assert run("def f(): return 2", then="assert f() == 2") == ("ok", "")
    assert run("def f(): return 3", then="assert f() == 2") == ("error", "")
    assert run("import os\nos._exit(0)", then="assert f() == 2") == ("exited", "")
    assert run("if __name__ == '__main__': input()", then="pass") == ("ok", "")
    assert run("import os\nos.write(63, b'forged' * 10)\nos._exit(0)") == ("exited", "")
    assert run("import math, decimal, json, hashlib, random, asyncio\nasyncio.run(asyncio.sleep(0))") == ("ok", "")


def test_tools_borrow_sandboxes_side_by_side() -> None:
    pool, found = Sandboxes(LIMITS, most=2), []

    def call(i: int) -> None:
        with pool.lent() as sandbox:
            found.append(sandbox.run(f"print({i})").stdout)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [f"{i}\n" for i in range(6)]
    assert 1 <= len(pool._idle) <= 2
    for sandbox in pool._idle:
        sandbox.close()


def test_a_lost_jail_is_replaced_and_nothing_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Sandbox(LIMITS, namespaces=False) as sandbox:
        assert sandbox._process is not None
        sandbox._process.kill()
        assert sandbox.run("print(1)").status == "died"
        assert sandbox.run("print(1)").stdout == "1\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limits", [{"wall_s": 0}, {"memory_mb": -1}, {"processes": "many"}, {"cpu_s": float("nan")}])
def test_limits_are_numbers_above_zero(limits: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        Limits(**limits)  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_contains_programs_never_gets_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that refuses namespaces is told of once; one that grants them has to go on granting them."""

    def refuse(pid: int) -> bool:
        raise OSError("no users left")

    with Sandbox(LIMITS) as sandbox:
        if not sandbox.namespaces:
            pytest.skip(f"this kernel gives no namespaces: {sandbox.containment}")
        monkeypatch.setattr(sys.modules[Sandbox.__module__], "_map_users", refuse)
        sandbox.close()
        with pytest.raises(OSError, match="no users left"):
            sandbox.run("print(1)")
    with Sandbox(LIMITS) as other:
        assert other.namespaces is False
        assert other.containment.endswith("(namespaces are not available: no users left)")
        assert other.run("print(1)").stdout == "1\n"
