"""One Spark session for all tests of a run: it takes ten seconds to come up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import reef
import reef.spark
from jvm.build import spark_jars
from tests.support.spark_sessions import configured


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
    builder = configured(SparkSession.builder.master("local[2]"), **here)
    session = reef.spark.configure(builder).getOrCreate()
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


@pytest.fixture
def catalog(spark, url, request):
    """A catalog over an empty bucket; every test has one of its own name."""
    name = f"c{abs(hash(request.node.name))}"
    spark.conf.set(f"spark.sql.catalog.{name}", "reef.spark.ReefCatalog")
    spark.conf.set(f"spark.sql.catalog.{name}.url", url)
    return f"{name}.default"


@pytest.fixture(scope="session")
def java_classes(java17, tmp_path_factory):
    """Compile the programs of tests/spark/jvm, once; return the class path to run them."""
    classes = tmp_path_factory.mktemp("classes")
    path = f"{reef.spark.jar_path()}:{spark_jars()}/*:{classes}"
    sources = (Path(__file__).parent / "jvm").glob("*.java")
    subprocess.run(["javac", "-nowarn", "-cp", path, "-d", classes, *sources], check=True)
    return path


@pytest.fixture(scope="session")
def java_program(java17, java_classes):
    """Return a call that takes the name of a program, which sees the reader's own classes.

    It returns a call that runs the program with arguments; its attribute `command` is the command
    line.
    """

    def program(name):
        opened = ["java.nio", "java.lang", "java.util", "sun.nio.ch"]
        opens = [f"--add-opens=java.base/{module}=ALL-UNNAMED" for module in opened]
        java = [str(java17.path()), "-Xmx96m", "-Xshare:auto", "-XX:TieredStopAtLevel=1"]
        command = [*java, *opens, "-cp", java_classes, f"reef.spark.{name}"]

        def run(*arguments):
            return subprocess.run(
                [*command, *map(str, arguments)],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )

        run.command = command
        return run

    return program
