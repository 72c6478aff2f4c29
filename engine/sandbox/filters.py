"""Restricts a process's requests to the kernel: a seccomp filter, Landlock rules, no capabilities. Linux only.

None of this needs a privilege, and none can be undone. The mounts of a namespace are here too. Only the scripts
`jail.py` and `mounted.py` load this file, by its path.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence

libc = ctypes.CDLL(None, use_errno=True)

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_CAPBSET_DROP = 38, 22, 24
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522
MNT_DETACH = 2

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
COMMON = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434, "clone3": 435, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "memfd_secret": 447, "process_mrelease": 448,
}  # fmt: skip
X86_64 = {
    "shmget": 29, "socket": 41, "clone": 56, "fork": 57, "vfork": 58, "kill": 62, "semget": 64, "msgget": 68,
    "mkdir": 83, "ptrace": 101, "syslog": 103, "rt_sigqueueinfo": 129, "setpriority": 141, "sched_setparam": 142,
    "sched_setscheduler": 144, "pivot_root": 155, "chroot": 161, "mount": 165, "umount2": 166, "tkill": 200,
    "sched_setaffinity": 203, "tgkill": 234, "mq_open": 240, "add_key": 248, "request_key": 249, "keyctl": 250,
    "ioprio_set": 251, "migrate_pages": 256, "unshare": 272, "move_pages": 279, "rt_tgsigqueueinfo": 297,
    "mkdirat": 258, "perf_event_open": 298, "prlimit64": 302, "open_by_handle_at": 304, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "sched_setattr": 314, "memfd_create": 319,
    "bpf": 321, "userfaultfd": 323,
}  # fmt: skip
AARCH64 = {
    "ioprio_set": 30, "mkdirat": 34, "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "unshare": 97,
    "syslog": 116, "ptrace": 117, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122,
    "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "setpriority": 140, "mq_open": 180, "msgget": 186,
    "semget": 190, "shmget": 194, "socket": 198, "add_key": 217, "request_key": 218, "keyctl": 219, "clone": 220,
    "migrate_pages": 238, "move_pages": 239, "rt_tgsigqueueinfo": 240, "perf_event_open": 241, "prlimit64": 261,
    "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
    "sched_setattr": 274, "memfd_create": 279, "bpf": 280, "userfaultfd": 282,
}  # fmt: skip
NUMBERS = {"x86_64": X86_64, "aarch64": AARCH64}

ALWAYS = (
    "socket", "io_uring_setup", "bpf", "perf_event_open", "userfaultfd", "add_key", "request_key", "keyctl", "syslog",
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease", "kcmp", "pidfd_getfd",
    "unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount", "fsopen", "fsconfig",
    "fsmount", "fspick", "mount_setattr", "open_by_handle_at",
    # these allocate memory that is charged to no process
    "memfd_create", "memfd_secret", "shmget", "msgget", "semget", "mq_open",
)  # fmt: skip
"""System calls that are always refused."""
OTHERS = (
    "fork", "vfork", "pidfd_open", "pidfd_send_signal", "setpriority", "ioprio_set", "rt_sigqueueinfo",
    "rt_tgsigqueueinfo", "migrate_pages", "move_pages",
    "mkdir", "mkdirat",  # ten thousand nested directories take a minute to remove
)  # fmt: skip
"""Further system calls that are refused without namespaces, where other processes are visible."""
OF_ITSELF = (
    "kill", "tkill", "tgkill", "prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam",
    "sched_setattr",
)  # fmt: skip
"""System calls whose first argument is a process; without namespaces they are allowed on the caller itself only."""
CLONE_THREAD, CLONE_NEW = 0x10000, 0x7E020000

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, REFUSE, ABSENT = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ, READ_DIRECTORY, WRITE = 1 << 2, 1 << 3, 1 << 1
WITH_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""Bits of all accesses to files that a version of Landlock handles."""
OF_FILES = (1 << 0) | WRITE | READ | (1 << 14) | (1 << 15)  # accesses that apply to files other than directories


def available() -> bool:
    """Return whether there is a filter for this system."""
    return sys.platform == "linux" and platform.machine() in ARCH and sys.byteorder == "little"


def check(result: int, what: str) -> int:
    """Return ``result`` of a call into libc.

    Raises:
        OSError: it is negative.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def mount(source: str | None, place: str, kind: str | None, flags: int, data: str = "") -> None:
    """Mount; the arguments are those of mount(2).

    Raises:
        OSError: the kernel refuses it.
    """
    words = [None if word is None else word.encode() for word in (source, place, kind)]
    check(libc.mount(*words, ctypes.c_ulong(flags), data.encode()), f"mount {place}")


def enter_root(root: str) -> None:
    """Make the mount ``root`` the root of this namespace, and detach the old one.

    Raises:
        OSError: the kernel refuses it.
    """
    os.chdir(root)
    check(libc.syscall(NUMBERS[platform.machine()]["pivot_root"], b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")


def drop_capabilities() -> None:
    """Give up every capability, permanently; this needs no privilege."""
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header, nothing = struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24)
    check(libc.capset(header, nothing), "capset")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def filter_calls(*, alone: bool) -> None:
    """Refuse system calls that could affect more than the process itself.

    Args:
        alone: other processes are visible: also refuse to start or affect any.

    Raises:
        OSError: the kernel accepts no filter.
    """
    machine = platform.machine()
    numbers = COMMON | NUMBERS[machine]
    code: list[tuple[int, int, int, int]] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, ARCH[machine]), (RETURN, 0, 0, KILL)]
    code += [(LOAD, 0, 0, 0), (AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, REFUSE)]  # x32
    for name in ALWAYS + (OTHERS if alone else ()):
        if name in numbers:
            code += [(EQUAL, 0, 1, numbers[name]), (RETURN, 0, 0, REFUSE)]
    code += [(EQUAL, 0, 1, numbers["clone3"]), (RETURN, 0, 0, ABSENT)]  # libc falls back on clone
    flags = [(ANY_BIT, 1, 0, CLONE_THREAD), (RETURN, 0, 0, REFUSE)] if alone else []
    flags += [(ANY_BIT, 0, 1, CLONE_NEW), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    code += [(EQUAL, 0, len(flags) + 1, numbers["clone"]), (LOAD, 0, 0, 16), *flags]
    for name in OF_ITSELF if alone else ():
        on_itself = [(EQUAL, 2, 0, 0), (EQUAL, 1, 0, os.getpid()), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
        code += [(EQUAL, 0, len(on_itself) + 1, numbers[name]), (LOAD, 0, 0, 16), *on_itself]
    code.append((RETURN, 0, 0, ALLOW))
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
    program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(instructions))
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0), "seccomp")


def landlock_version() -> int:
    """Return the kernel's version of Landlock; 0 if it has none."""
    version: int = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    return max(version, 0)


def restrict_files(readable: Sequence[str], folder: str) -> None:
    """Allow the process to read below ``readable``, every access below ``folder``, and no other files.

    Raises:
        OSError: the kernel has no Landlock.
    """
    version = landlock_version()
    handled = WITH_VERSION[max((v for v in WITH_VERSION if v <= version), default=1)]
    attributes = struct.pack("QQQ", handled, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = check(libc.syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock")
    for path, access in [
        *((path, READ | READ_DIRECTORY) for path in readable),
        ("/dev/null", READ | WRITE),
        (folder, handled),
    ]:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("Qi", (access if os.path.isdir(path) else access & OF_FILES) & handled, fd)
        check(libc.syscall(LANDLOCK_ADD, rules, 1, rule, 0), "landlock")
        os.close(fd)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    check(libc.syscall(LANDLOCK_RESTRICT, rules, 0), "landlock")
    os.close(rules)
