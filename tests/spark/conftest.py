"""One Spark session for all tests of a run: it takes ten seconds to come up."""

import os
import sys

import pytest

import reef
from tests.spark.sessions import configured


@pytest.fixture(scope="session")
def spark_home(java17, tmp_path_factory):
    """Point Spark at this Python, and at a Java that is new enough."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["JAVA_HOME"] = str(java17.path().resolve().parent.parent)
    return tmp_path_factory.mktemp("spark")


@pytest.fixture(scope="session")
def spark(spark_home):
    """A session on two threads."""
    from pyspark.sql import SparkSession

    here = {"spark.sql.warehouse.dir": str(spark_home / "warehouse")}
    session = configured(SparkSession.builder.master("local[2]"), **here).getOrCreate()
    yield session
    session.stop()


@pytest.fixture
def url(tmp_path):
    """An empty directory for a bucket."""
    return str(tmp_path / "bucket")


@pytest.fixture
def db(url):
    """The database in it."""
    return reef.open(url)
