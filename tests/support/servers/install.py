"""Install the programs of the servers that no Python package provides.

    python -m tests.support.servers.install             everything that tests use
    python -m tests.support.servers.install java17      only these parts

1. Check for missing parts; when there are none, say so and end within two seconds.
2. On Debian, as root: one `apt-get update`, then one `apt-get install` for all that is missing.
   When that fails, each part is tried alone, so that one bad part does not take the others along.
3. With Node there: `npm install` with exact versions, for which root is not needed.

One line for each part says what became of it, and the exit status is 0 whatever happened: the
tests decide whether they can do without. What apt and npm print goes to `.servers/install.log`.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.servers import SERVERS, TOOLS, npm
from tests.support.servers.base import REPOSITORY, one_line
from tests.support.servers.lookup import find_program, missing_programs

LOG_PATH = REPOSITORY / ".servers" / "install.log"
ATTEMPTS_MAX = 3
RETRY_PAUSE_S = 5.0
COMMAND_TIMEOUT_S = 900.0
COMPLAINTS = ("E:", "npm error", "npm ERR!")

PACKAGES = {
    "ceph": ("radosgw", "ceph-mon", "ceph-osd", "ceph-mgr", "ceph-common"),
    "postgresql": ("postgresql",),
    "mariadb": ("mariadb-server-core", "mariadb-client-core"),
    "java17": ("openjdk-17-jdk-headless",),
    "strace": ("strace",),
    "node": ("nodejs", "npm"),
}

POLICY_PATH = Path("/usr/sbin/policy-rc.d")
POLICY = (
    "#!/bin/sh\n# Written by tests.support.servers.install, which removes it again.\nexit 101\n"
)


class InstallError(Exception):
    """A part could not be had; the message says why."""


def main(names: list[str]) -> int:
    """Install missing parts and report on every part, or on those that are named."""
    if names:
        install_debian_parts(names)
        return 0
    install_debian_parts(list(PACKAGES))
    install_npm_parts()
    for name in ("seaweedfs", "ministack", "rclone", "moto"):
        report(name, missing(name))  # the Python environment's business
    return 0


def report(name: str, reason: str | None, done: str = "present") -> None:
    """Print one line: `done`, or why the part could not be had."""
    print(f"{name}: could not be had: {one_line(reason)}" if reason else f"{name}: {done}")


def missing(name: str) -> str | None:
    """Why a part is not there yet, or None."""
    if name == "node":
        return missing_programs("node", "npm")
    return (SERVERS | TOOLS)[name].available()


def install_debian_parts(names: list[str]) -> None:
    """Install what Debian packages, in one go where possible."""
    lacking = [name for name in names if missing(name)]
    failures = apt_install(lacking) if lacking else {}
    for name in names:
        reason = missing(name)
        done = "installed" if name in lacking else "present"
        report(name, reason and failures.get(name, reason), done)


def apt_install(names: list[str]) -> dict[str, str]:
    """Install parts; return the reason for each one that failed."""
    if reason := apt_refuses():
        return {name: f"{missing(name)}; {reason}" for name in names}
    with no_services_started():
        with contextlib.suppress(InstallError):  # an old package list may do as well
            retry(lambda: apt("update"))
        try:
            retry(lambda: apt("install", *(word for name in names for word in PACKAGES[name])))
        except InstallError:
            return apt_install_one_by_one(names)
    return {}


def apt_install_one_by_one(names: list[str]) -> dict[str, str]:
    """Install parts separately; return the reason for each one that failed."""
    failures = {}
    for name in names:
        try:
            apt("install", *PACKAGES[name])
        except InstallError as error:
            failures[name] = str(error)
    return failures


def apt_refuses() -> str | None:
    """Why apt cannot be asked at all, or None."""
    if not Path("/etc/debian_version").exists() or find_program("apt-get") is None:
        return "packages are installed on Debian only"
    return None if os.geteuid() == 0 else "packages are installed by root only"


def apt(verb: str, *packages: str) -> None:
    """Call apt-get without questions; it waits by itself for a while when its lock is held."""
    options = ["-y", "-q", "-o", "DPkg::Lock::Timeout=120", "-o", "Acquire::Retries=3"]
    options += ["--no-install-recommends"] if verb == "install" else []
    command([find_program("apt-get"), *options, verb, *packages], DEBIAN_FRONTEND="noninteractive")


@contextlib.contextmanager
def no_services_started(path: Path = POLICY_PATH) -> Iterator[None]:
    """Keep packages from starting system services; a policy that is there already stays.

    One that an interrupted run of this module left behind counts as its own.
    """
    if path.exists() and path.read_text(errors="replace") != POLICY:
        yield
        return
    path.write_text(POLICY)
    path.chmod(0o755)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def install_npm_parts() -> None:
    """Azurite and Dynalite, when Node and npm are there."""
    reason, done = None, "present"
    if not npm.is_installed():
        done = "installed"
        reason = missing("node") or npm_install()
    for name in npm.VERSIONS:
        report(name, reason, done)


def npm_install() -> str | None:
    """Install the exact versions and stamp the folder; return the reason of a failure.

    No lock file is kept: it would name the registry that this machine happens to use.
    """
    folder = npm.npm_folder()
    folder.mkdir(parents=True, exist_ok=True)
    npm.stamp_path().unlink(missing_ok=True)
    flags = ["--no-save", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"]
    # Its own retries take minutes; ours come on top.
    flags += ["--fetch-retries=1", "--fetch-retry-maxtimeout=10000"]
    argv = [find_program("npm"), "install", *flags, "--prefix", folder, *npm.STAMP.split()]
    try:
        retry(lambda: command(argv))
    except InstallError as error:
        return str(error)
    (folder / "node_modules" / ".package-lock.json").unlink(missing_ok=True)
    npm.stamp_path().write_text(npm.STAMP)
    return None


def retry(attempt: Callable[[], None]) -> None:
    """Try a few times: locks are held for a while, and networks have hiccups."""
    for number in range(1, ATTEMPTS_MAX + 1):
        try:
            return attempt()
        except InstallError:
            if number == ATTEMPTS_MAX:
                raise
            time.sleep(RETRY_PAUSE_S * number)
    return None


def command(argv: list, **env: str) -> None:
    """Run a program with its output in the log; a failure carries the last lines of it."""
    LOG_PATH.parent.mkdir(parents=True, exist_ok=True)
    with LOG_PATH.open("a+b") as log:
        start = log.tell()
        try:
            subprocess.run(
                [str(word) for word in argv],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=COMMAND_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            log.seek(start)
            said = log.read().decode(errors="replace").splitlines()
            worst = [line for line in said if line.startswith(COMPLAINTS)] or said
            raise InstallError("; ".join(worst[:3]) or one_line(error)) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
