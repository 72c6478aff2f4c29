"""A script: listens on the loopback address of another process's network, and hands the socket to its parent.

    python inside.py PID PORT FD

The socket belongs to that network wherever it is used, so the parent can accept what connects to it there. Where this
user may not enter the network at once, the process's user namespace is entered before, as for podman without root.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


def main(pid: str, port: str, fd: str) -> None:
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(network, CLONE_NEWNET) != 0:
        user = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
        for namespace, kind in ((user, CLONE_NEWUSER), (network, CLONE_NEWNET)):
            if libc.setns(namespace, kind) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.create_server(("127.0.0.1", int(port)), backlog=128) as listening:
        socket.send_fds(socket.socket(fileno=int(fd)), [b"!"], [listening.fileno()])


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except OSError as error:
        sys.exit(str(error.strerror or error))
