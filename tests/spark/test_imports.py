"""Imports of a Python process of an executor before its first task."""

import subprocess
import sys

import pytest

import reef
import reef.spark


def imported(program):
    """Return the modules of Reef that a program has imported at its end."""
    report = f"{program}\nimport sys\nprint(*(name for name in sys.modules if 'reef' in name))"
    done = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, check=True, timeout=240
    )
    return set(done.stdout.split())


def test_a_task_that_reads_imports_neither_jobs_nor_writers():
    """Every process of every executor pays for its imports, before its first row."""
    found = imported("import pyspark_reef")
    assert "reef.engine.read.view" in found
    assert not {name for name in found if name.startswith(("reef.jobs", "reef.engine.commit"))}
    assert not found & {
        "reef.api",
        "reef.engine.handles.database",
        "reef.spark.sink",
        "reef.spark.bulk_loader",
    }


@pytest.mark.parametrize("package", [reef, reef.spark], ids=["reef", "reef.spark"])
def test_all_names_are_there_when_they_are_asked_for(package):
    """Those of `__all__`, each from its home, also after the modules were imported by others."""
    assert package.__all__ == sorted(package.__all__)
    homes = {*package._HOMES, *getattr(package, "_PARTS", ())}
    assert homes >= set(package.__all__) - {"__version__"}
    for name in package.__all__:
        assert getattr(package, name) is not None
        assert name in dir(package)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # noqa: B018 - asking is the test
    assert callable(reef.spark.table)
    assert callable(reef.spark.executor)
