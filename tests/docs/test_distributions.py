"""Wheel and sdist: they build, install into an empty environment, and work there."""

import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
PROGRAM = """
import pyarrow as pa, reef
with reef.open("./data") as db:
    db.create("events", pa.schema([("id", pa.string()), ("n", pa.int64())]))
    with db.writer("events") as events:
        events.upsert([{"id": "a", "n": 1}])
    reef.jobs.fold(db, "events")
    with db.reader("events") as events:
        assert events.get("a") == {"id": "a", "n": 1}
    assert reef.jobs.verify(db, "events", deep=True).ok
print(reef.__version__, reef.__file__)
try:
    import reef.spark
    reef.spark.bulk_load
except ImportError as error:
    print("without Spark:", error)
"""


def run(*command, cwd):
    """Run a program; return its output."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory, java17):
    """Give a clean checkout with the native reader, as `make jar` leaves it."""
    folder = tmp_path_factory.mktemp("source") / "reef"
    run("git", "clone", "--quiet", "--no-hardlinks", ROOT, folder, cwd=ROOT)
    run(sys.executable, "jvm/build.py", "src/reef/spark/reef-spark.jar", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    """Give a Python with the build backend of pyproject.toml, and nothing else."""
    folder = tmp_path_factory.mktemp("builder")
    venv.create(folder, with_pip=True)
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", *backend, cwd=folder)
    return folder / "bin/python"


@pytest.fixture(scope="module")
def sdist(source, builder):
    """Build the sdist."""
    build = "import setuptools.build_meta as backend; print(backend.build_sdist('dist'))"
    return source / "dist" / run(builder, "-c", build, cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(sdist, builder):
    """Build the wheel from the sdist, as users without a wheel do."""
    pip = (builder, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", sdist.parent, sdist, cwd=sdist.parent)
    return next(sdist.parent.glob("*.whl"))


def test_the_sdist_has_all_that_a_build_needs(sdist):
    """The sources of the native reader too, and no test servers or virtual environments."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "README.md",
        "LICENSE",
        "jvm/build.py",
        "src/reef/py.typed",
        "src/reef_command.py",
    ):
        assert name in names
    assert any(name.endswith(".java") for name in names)
    assert not any(name.startswith((".venv", ".servers", "build/")) for name in names)


def test_the_wheel_has_the_package_and_its_types(wheel):
    """And the jar of the native reader."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"reef/py.typed", "reef/__init__.py", "reef_command.py"} <= names
    assert "reef/spark/reef-spark.jar" in names
    assert not any(name.startswith(("tests/", "benchmarks/", "docs/")) for name in names)


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_installs_into_an_empty_environment_and_works(kind, request, tmp_path):
    """With its dependencies alone: tables, jobs, the command line; Spark is named as missing."""
    venv.create(tmp_path / "venv", with_pip=True)
    python, reef = tmp_path / "venv/bin/python", tmp_path / "venv/bin/reef"
    archive = request.getfixturevalue(kind)
    pinned = ("-c", ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", "--quiet", *pinned, archive, cwd=tmp_path)
    said = run(python, "-W", "error", "-c", PROGRAM, cwd=tmp_path)
    assert f"{tmp_path}/venv" in said
    assert "without Spark:" in said
    run(reef, "create", "./data", "users", cwd=tmp_path)
    run(reef, "put", "./data", "users", "u1", "Ada", cwd=tmp_path)
    assert "Ada" in run(reef, "get", "./data", "users", "u1", cwd=tmp_path)
    assert "put" in run(reef, "--help", cwd=tmp_path)
