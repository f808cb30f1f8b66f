"""Which Python the tasks of a configured session run."""

import os
import sys

import pytest

import reef.spark


class Builder:
    """A session builder, as far as `configure` uses one: no session is started."""

    def __init__(self, master=None):
        self._options = {} if master is None else {"spark.master": master}

    def config(self, name, value):
        self._options[name] = value
        return self


@pytest.mark.parametrize("master", [None, "local", "local[2]"])
def test_local_tasks_run_the_python_of_the_driver(monkeypatch, master):
    """Spark's default, the `python3` of the PATH, lacks the packages of a virtual environment."""
    monkeypatch.setenv("PYSPARK_PYTHON", "/removed/at/the/end")
    monkeypatch.delenv("PYSPARK_PYTHON")
    reef.spark.configure(Builder(master))
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


def test_a_python_that_is_set_is_kept(monkeypatch):
    """The user may have chosen another one."""
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/python")
    reef.spark.configure(Builder("local[2]"))
    assert os.environ["PYSPARK_PYTHON"] == "/opt/python"


def test_a_cluster_has_a_python_of_its_own(monkeypatch):
    """The driver's path means nothing there."""
    monkeypatch.setenv("PYSPARK_PYTHON", "/removed/at/the/end")
    monkeypatch.delenv("PYSPARK_PYTHON")
    reef.spark.configure(Builder("spark://host:7077"))
    assert "PYSPARK_PYTHON" not in os.environ


@pytest.mark.parametrize("rows", [[{"id": "a"}], None, "select 1"], ids=repr)
def test_rows_that_are_no_dataframe_are_refused(tmp_path, rows):
    """By name, before anything is written; the hint has the way without Spark."""
    for call in (reef.spark.bulk_load, reef.spark.preflight, reef.spark.search):
        with pytest.raises(reef.InvalidInputError, match=r"expected a DataFrame.*ingest"):
            call(rows, str(tmp_path), "events")
