"""Runs the core of Reef on every version of Spark that it supports: `make spark-versions`.

    python -m tests.spark.versions [VERSION …]

Each version is installed into a folder of its own, without its dependencies, which all versions
share. The jar that the wheel ships is compiled against the installed version and must run on all
of them; that it compiles against each one is checked too, and that a package without the jar reads
through Python.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyspark

ROOT = Path(__file__).parent.parent.parent
HOME = ROOT / ".servers" / "pyspark"
VERSIONS = ("4.1.4", "4.2.1", "4.3.0")
"""The newest release of each line."""
TIMEOUT_S = 1200


def environment(version, source=ROOT / "src"):
    """Return the variables under which a Python process uses a version of Spark."""
    path = [str(source), str(ROOT)]
    if version != pyspark.__version__:
        path.insert(0, str(installed(version)))
    known = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"}
    return {
        **known,
        "PYTHONPATH": os.pathsep.join(path),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def installed(version):
    """Return the folder of a version, installed if it is not there."""
    folder = HOME / version
    if not (folder / "pyspark" / "jars").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", str(folder), f"pyspark=={version}"], check=True)
    return folder


def run(version, *argv, source=ROOT / "src"):
    """Run a Python program with a version of Spark; return its output, or fail with its errors."""
    done = subprocess.run(
        [sys.executable, *map(str, argv)],
        cwd=ROOT,
        env=environment(version, source),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"{argv} with Spark {version}:\n{done.stdout}\n{done.stderr[-4000:]}")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def core(version, master="local[2]"):
    """Run the core checks with a version of Spark, in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        return run(version, "-m", "tests.spark.core_driver", master, folder)


def core_without_jar(version):
    """Run the core checks with a copy of the package that has no jar."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        without = shutil.ignore_patterns("*.jar", "__pycache__")
        shutil.copytree(ROOT / "src", source, ignore=without)
        argv = ("-m", "tests.spark.core_driver", "local[2]", folder)
        return run(version, *argv, source=source)


def compiles(version):
    """Compile the jar against a version."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "reef-spark.jar"
        run(version, ROOT / "jvm" / "build.py", target)
        assert target.stat().st_size > 10_000
        return f"pyspark {version}: the jar compiles, {target.stat().st_size} bytes"


def main():
    """Check all versions, and print what was found for each."""
    for version in sys.argv[1:] or VERSIONS:
        print(compiles(version), flush=True)
        print(core(version), flush=True)
    print(core_without_jar(pyspark.__version__), flush=True)


if __name__ == "__main__":
    main()
