"""House rules that a program can check; CI runs them because they are tests."""

import ast
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [["ruff", "format", "--check", "."], ["ruff", "check", "."], ["mypy"], ["lint-imports"]],
    ids=" ".join,
)
@pytest.mark.timeout(900)  # mypy without its cache, on whatever cores are left
def test_make_check_is_clean(command):
    """Formatting, lint, strict types and import layers, as `make check`."""
    done = subprocess.run(
        [BIN / command[0], *command[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_lint_really_bans_time_and_threads(tmp_path):
    """A module that reaches around the runtime is caught."""
    bad = tmp_path / "src" / "bad.py"
    bad.parent.mkdir()
    bad.write_text('"""Bad."""\n\nimport random\nimport threading\nimport time\n')
    command = [BIN / "ruff", "check", "--config", ROOT / "pyproject.toml", "--select", "TID", bad]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.count("TID251") == 3, done.stdout


@pytest.mark.parametrize("path", TESTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_test_states_its_behaviour(path):
    """A test without a docstring says nothing when it fails."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            assert ast.get_docstring(node), f"{path.name}: {node.name}"


def test_unit_tests_mirror_the_source():
    """A test is in the folder of the package that it tests, so that it is easy to find.

    Every folder of tests/unit is a package, and every package has one, or a folder of tests/ by
    its own name. A package without subfolders here would hide its tests among those of another.
    """
    unit, source = ROOT / "tests" / "unit", ROOT / "src" / "reef"
    folders = {path.parent.relative_to(unit) for path in unit.rglob("test_*.py")}
    assert [folder for folder in folders if not (source / folder).is_dir()] == []
    packages = {path.parent.name for path in source.glob("*/__init__.py")}
    packages |= {f"engine/{path.parent.name}" for path in source.glob("engine/*/__init__.py")}
    tested = {str(folder) for folder in folders} | {"cli", "spark"}  # these have tests/cli, …/spark
    assert packages - tested == {"testing"}, "the simulator's tests are in tests/simulation"


def test_unit_tests_name_the_module_that_they_test():
    """`test_<module>.py` or `test_<module>_<topic>.py`, so that the tests of a module are found.

    The name may also be that of a package: of the folder itself (`catalog/test_catalog_growth.py`),
    or of one in it (`jobs/test_sweep_bounds.py`).
    """
    unit, source = ROOT / "tests" / "unit", ROOT / "src" / "reef"
    nameless = []
    for path in unit.rglob("test_*.py"):
        folder = source / path.parent.relative_to(unit)
        subjects = {folder.name} | {module.stem for module in folder.iterdir()}
        subject = path.stem.removeprefix("test_")
        if not any(subject == name or subject.startswith(f"{name}_") for name in subjects):
            nameless.append(str(path.relative_to(ROOT)))
    assert nameless == []


def test_helpers_of_several_directories_are_in_support():
    """tests/ itself has no modules; a helper is in the directory of its tests, or in support."""
    assert [path.name for path in (ROOT / "tests").glob("*.py")] == ["__init__.py"]


def test_constraints_name_no_host():
    """Pinned versions only: no address, no path, no hash."""
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"#.*|[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", line), line


def test_every_dependency_is_pinned():
    """Every dependency of pyproject.toml is in constraints.txt."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    names = {re.match(r"[A-Za-z0-9._-]+", word)[0].lower() for word in asked} - {"reef"}
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    assert names <= pinned


def test_extras_exist():
    """The extras that the documentation names."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {"spark", "s3", "sql", "bench", "dev", "testing"} <= extras.keys()
    assert "pandas<3" in extras["spark"]


def test_make_lists_its_targets():
    """`make` alone is help; every listed target exists."""
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("demo", "test", "check", "bench", "sim", "evidence"):
        assert re.search(rf"make {target}\s+\w", done.stdout), done.stdout


def test_ci_runs_the_tests_of_the_readme():
    """CI runs the same targets as a person."""
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make test" in (ROOT / "README.md").read_text()
