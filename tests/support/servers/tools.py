"""Programs that tests call: Java 17 for Spark, strace to record syncs."""

import os
from pathlib import Path

from tests.support.servers.base import INSTALL_HINT, Tool
from tests.support.servers.lookup import find_program, program_version

JAVA_MAJOR_MIN = 17


class Java17(Tool):
    """A JDK 17 or newer, from any location."""

    name = "java17"

    def path(self) -> Path | None:
        """The first Java that is new enough: JAVA_HOME's, the PATH's, then Debian's own 17."""
        return next((java for java in java_candidates() if is_new_enough(java)), None)

    def available(self) -> str | None:
        """Needs a Java of that age, and the compiler for the native reader."""
        if self.path() is None:
            return f"no Java {JAVA_MAJOR_MIN} ({INSTALL_HINT})"
        return None if find_program("javac") else f"no javac ({INSTALL_HINT})"

    def version(self) -> str | None:
        """Version that the program prints."""
        return program_version(self.path(), "-version")


class Strace(Tool):
    """The tracer of system calls."""

    name = "strace"

    def path(self) -> Path | None:
        """On the PATH."""
        return find_program("strace")

    def available(self) -> str | None:
        """Needs the program."""
        return None if self.path() else f"no strace ({INSTALL_HINT})"

    def version(self) -> str | None:
        """Version that the program prints."""
        return program_version(self.path(), "-V")


def java_candidates() -> list[Path]:
    """Every Java that there may be, the preferred one first."""
    found = [find_program("java"), *Path("/usr/lib/jvm").glob("java-17-*/bin/java")]
    if home := os.environ.get("JAVA_HOME"):
        found.insert(0, Path(home) / "bin" / "java")
    return [path for path in found if path and path.is_file()]


def is_new_enough(java: Path) -> bool:
    """Whether a Java is at least 17; before Java 9 the major version came second (1.8)."""
    version = program_version(java, "-version")
    return version is not None and int(version.split(".")[0]) >= JAVA_MAJOR_MIN
