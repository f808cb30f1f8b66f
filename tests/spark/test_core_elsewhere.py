"""The core of Reef on Spark: every supported version, clusters, Spark Connect, the SQL shell.

Each case is a driver of its own (`tests/spark/core_driver.py`); `make spark-versions` runs the
versions alone.
"""

import logging

import pyspark
import pytest

import reef.spark
from reef.spark.session import JARS, SPARK_VERSIONS
from tests.spark import versions


def test_versions_that_are_tested_are_those_that_the_jar_is_for():
    """And the installed one is among them."""
    assert tuple(v.rpartition(".")[0] for v in versions.VERSIONS) == SPARK_VERSIONS
    assert pyspark.__version__ in versions.VERSIONS


class Builder:
    """A session builder that only remembers its settings."""

    def __init__(self):
        self.settings = {}

    def config(self, name, value):
        self.settings[name] = value
        return self


@pytest.mark.parametrize("version", ["4.0.2", "4.10.0", "5.0.0"])
def test_an_unknown_version_reads_through_python(monkeypatch, caplog, version):
    """A log line says so; a catalog is refused."""
    monkeypatch.setattr(pyspark, "__version__", version)
    assert reef.spark.jar_path() is None
    with caplog.at_level(logging.WARNING, "reef"):
        assert JARS not in reef.spark.configure(Builder()).settings
    assert f"Spark {version} reads through Python" in caplog.text
    with pytest.raises(reef.InvalidInputError, match="jar of the native reader"):
        reef.spark.configure(Builder(), url="./data")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", versions.VERSIONS)
def test_a_version_of_spark(java17, version):
    """The jar compiles against it, and the one that the package has runs on it."""
    versions.compiles(version)
    assert "engine jvm" in versions.core(version)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("master", ["local-cluster[2,1,1024]", "connect", "shell"])
def test_a_kind_of_session(java17, master):
    """Executors as processes, a remote session, and a shell without a Python driver."""
    assert "all checks hold" in versions.core(pyspark.__version__, master)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_package_without_the_jar(java17):
    """Reads and writes go through Python; `explain` shows it."""
    assert "engine python" in versions.core_without_jar(pyspark.__version__)
