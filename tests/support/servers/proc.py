"""Processes and their listening sockets, from /proc. Linux only."""

import contextlib
import socket
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
LISTEN = "0A"


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be reaped does not."""
    return state_and_session(pid)[0] not in ("", "Z", "X")


def state_and_session(pid: int) -> tuple[str, int]:
    """A process's state letter and session, or nothing when it is gone."""
    try:
        stat = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return "", 0
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], int(fields[3])


def processes_of(directory: Path, leader_pids: Iterable[int] = ()) -> set[int]:
    """Live processes that work in a directory or below it, or in one of these sessions.

    Both are needed: some daemons open sessions of their own, others change their directory.
    """
    leaders, found = set(leader_pids), set()
    for pid in (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()):
        if is_alive(pid) and (state_and_session(pid)[1] in leaders or works_in(pid, directory)):
            found.add(pid)
    return found


def works_in(pid: int, directory: Path) -> bool:
    """Whether a process's working directory is this one or below it."""
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / "cwd").readlink().is_relative_to(directory)
    return False


def listening_addresses(pids: Iterable[int]) -> set[str]:
    """The addresses, without ports, on which these processes accept TCP connections."""
    owned = {link for pid in pids for link in open_files(pid)}
    rows = [row.split() for name in ("tcp", "tcp6") for row in table(name)]
    return {
        decode_address(row[1].partition(":")[0])
        for row in rows
        if row[3] == LISTEN and f"socket:[{row[9]}]" in owned
    }


def open_files(pid: int) -> set[str]:
    """Targets of a process's file descriptors."""
    links = set()
    with contextlib.suppress(OSError):
        for entry in (PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                links.add(str(entry.readlink()))
    return links


def table(name: str) -> list[str]:
    """The kernel's table of sockets, without its heading."""
    with contextlib.suppress(OSError):
        return (PROC / "net" / name).read_text().splitlines()[1:]
    return []


def decode_address(text: str) -> str:
    """An address as the kernel prints it: words of four bytes in the machine's order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words))
