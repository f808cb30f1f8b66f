"""Paths and versions of programs."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

# Daemons are in sbin, which a plain user's PATH leaves out.
SBIN = ("/usr/local/sbin", "/usr/sbin")
VERSION_TIMEOUT_S = 120.0


def find_program(name: str) -> Path | None:
    """A program: next to this Python first (packages bring theirs along), then on the PATH."""
    sibling = Path(sys.executable).parent / name
    if sibling.is_file():
        return sibling
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *SBIN]))
    return Path(found) if found else None


def missing_programs(*names: str) -> str | None:
    """Which of these programs cannot be found, in words, or None."""
    missing = [name for name in names if find_program(name) is None]
    return f"no {', '.join(missing)}" if missing else None


def package_version(name: str) -> str | None:
    """The version of an installed Python package."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def program_version(program: Path | None, flag: str = "--version") -> str | None:
    """The first version number in the output of a program, on either stream."""
    if program is None:
        return None
    said = subprocess.run(
        [program, flag], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False
    )
    found = re.search(r"\d+(\.\d+)+", said.stdout + said.stderr)
    return found.group() if found else None
