"""Compile the native Spark reader: `python jvm/build.py TARGET.jar`.

Needs `javac` and `jar` of a JDK 17, and the jars of the installed pyspark to compile against. The
class files depend on Spark's public connector API and on nothing else that Spark does not ship.
"""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
SERVICE = "org.apache.spark.sql.sources.DataSourceRegister"
PROVIDER = "reef.spark.ReefSource"
RELEASE = "17"


def spark_jars() -> Path | None:
    """Return the folder with the jars of the installed pyspark.

    pip builds in isolation: there pyspark cannot be imported, but is where pip installs to.
    """
    spec = importlib.util.find_spec("pyspark")
    imported = list(spec.submodule_search_locations or ()) if spec is not None else []
    for package in (*imported, Path(sysconfig.get_path("purelib")) / "pyspark"):
        if (jars := Path(package) / "jars").is_dir():
            return jars
    return None


def missing() -> str | None:
    """Return what a build lacks here; None if it can run."""
    for tool in ("javac", "jar"):
        if shutil.which(tool) is None:
            return f"{tool} of a JDK {RELEASE}"
    return None if spark_jars() else "pyspark"


def build(target: Path) -> None:
    """Compile all sources into one jar; replaces the target when everything has succeeded."""
    sources = sorted(str(path) for path in SOURCES.rglob("*.java"))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        classes, made = Path(folder) / "classes", Path(folder) / "reef-spark.jar"
        services = classes / "META-INF" / "services"
        services.mkdir(parents=True)
        (services / SERVICE).write_text(f"{PROVIDER}\n")
        flags = ["--release", RELEASE, "-encoding", "UTF-8", "-Werror", "-Xlint:all"]
        quiet = "-Xlint:-processing,-classfile,-serial,-path,-deprecation,-options"
        path = f"{spark_jars()}/*"
        subprocess.run(
            ["javac", *flags, quiet, "-cp", path, "-d", str(classes), *sources], check=True
        )
        date = "--date=2026-01-01T00:00:00Z"  # the same sources give the same bytes
        subprocess.run(
            ["jar", "--create", "--file", str(made), date, "-C", str(classes), "."], check=True
        )
        made.replace(target)  # not written in place: JVMs that run have the former one open


def main() -> int:
    """Build, or say what is missing; a missing JDK is no error, since Python reads as well."""
    lacking = missing()
    if lacking is not None:
        print(f"the native Spark reader is not built: {lacking} is missing", file=sys.stderr)
        return 0
    try:
        build(Path(sys.argv[1]))
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
