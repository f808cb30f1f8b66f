"""A driver in a process of its own, for tests that kill it or its executors.

    python driver.py cluster URL     executors are processes: a task fails after its upload, an
                                     executor is killed in the middle of a load, another one in
                                     the middle of a compaction, and in the end this driver dies
                                     right after a commit
    python driver.py speculate URL   two workers with addresses of their own, since Spark never
                                     runs two attempts of a task on one host
    python driver.py dies URL        dies before the commit of a load
    python driver.py write-before URL, write-after URL
                                     dies in `df.write`, before its commit or after it
    python driver.py connect URL     the same writes over Spark Connect

A third argument has the options of the store, as JSON. Prints one line of JSON for each scenario
that went through. Run as a program, so that its classes travel to the workers by value.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pyspark
from pyspark import TaskContext
from pyspark.sql import SparkSession

import reef
import reef.spark
from reef.jobs import BulkJob
from reef.spark.sink import ReefWriter, arrow_columns
from tests.support.servers.base import free_port
from tests.support.spark_sessions import configured

ROWS = 4000
SLOW_S = 200


def emit(scenario, **facts):
    """Print what happened."""
    print(json.dumps({"scenario": scenario, **facts}), flush=True)


def session(master, **config):
    """Start a session."""
    return configured(SparkSession.builder.master(master), **config).getOrCreate()


def numbers(spark, partitions=4):
    """Return rows in no order."""
    rows = spark.range(ROWS, numPartitions=partitions)
    return rows.selectExpr(f"lpad(id * 7919 % {ROWS}, 6, '0') AS id", "id AS n")


def slow(df, seconds):
    """Return the same rows, each partition after some time."""

    def wait(batches):
        time.sleep(seconds)
        yield from batches

    return df.mapInArrow(wait, df.schema)


# --- executors --------------------------------------------------------------------------


def executors():
    """Return the process ids of this driver's executors."""
    parents, found = {}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
            if b"CoarseGrainedExecutorBackend" in command and b"java" in command.split(b"\0")[0]:
                found.append(int(entry.name))
    return [pid for pid in found if os.getpid() in ancestors(pid, parents)]


def ancestors(pid, parents):
    """Return the processes above one."""
    found = []
    while pid in parents and pid > 1:
        pid = parents[pid]
        found.append(pid)
    return found


def kill_when_a_segment_is_staged(db, name, killed):
    """Wait for the first upload of a job, then kill -9 an executor."""
    prefix = f"namespaces/{name}/segments/"
    before = len(list(db.store.list(prefix)))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(list(db.store.list(prefix))) == before:
        time.sleep(0.05)
    victim = executors()[0]
    os.kill(victim, signal.SIGKILL)
    killed.append(victim)


@contextmanager
def an_executor_killed(db, name):
    """Kill one as soon as a new segment of a namespace is staged; give the list of the dead."""
    killed = []
    killer = threading.Thread(target=kill_when_a_segment_is_staged, args=(db, name, killed))
    killer.start()
    yield killed
    killer.join()


def executor_killed(spark, url, options):
    """A load continues when an executor is killed after the first segment was staged."""
    db = reef.open(url, **options)
    db.create("killed", arrow_columns(numbers(spark).schema, {}))
    # Partitions end one after the other: the kill strikes while others are at work.
    late = numbers(spark).selectExpr("id", "n").repartitionByRange(6, "id")
    wanted = {"idempotency_key": "k", "store_options": options}
    with an_executor_killed(db, "killed") as killed:
        report = reef.spark.bulk_load(
            slow(late, 0.2), url, "killed", partitions=6, count=False, **wanted
        )
    again = reef.spark.bulk_load(numbers(spark), url, "killed", **wanted)
    emit("executor", killed=len(killed), lsn=report.lsn, rows=report.rows, again=again.replayed)


class SlowExecutor(reef.spark.SparkExecutor):
    """Gives the killer time: tasks end one after the other."""

    def map(self, run, tasks):
        """Run the same tasks, each after a while."""

        def later(task):
            time.sleep(0.3)
            return run(task)

        return super().map(later, tasks)


def executor_killed_in_compaction(spark, url, options):
    """A compaction continues when an executor is killed after its first output."""
    db = reef.open(url, **options)
    db.create("compacted", arrow_columns(numbers(spark).schema, {}))
    with db.writer("compacted", background=False) as writer:
        for part in range(3):
            ids = [f"{n * 7919 % ROWS:06}" for n in range(part, ROWS, 3)]
            writer.upsert({"id": ids, "n": list(range(part, ROWS, 3))})
            reef.jobs.fold(db, "compacted", group_bytes=1024)
    with an_executor_killed(db, "compacted") as killed:
        report = reef.jobs.compact(
            db, "compacted", full=True, executor=SlowExecutor(spark), segment_rows_max=300
        )
    emit("compaction", killed=len(killed), outputs=report.outputs, rows=report.rows_written)


# --- attempts ---------------------------------------------------------------------------


class FailsOnce(ReefWriter):
    """A task fails after its upload, the first time."""

    def write(self, iterator):
        """Stage, then fail."""
        message = super().write(iterator)
        context = TaskContext.get()
        if context.attemptNumber() == 0 and context.partitionId() == 1:
            raise OSError("lost after the upload")
        return message


class SlowOnce(ReefWriter):
    """A task takes long after its upload, so that Spark runs a second attempt concurrently."""

    def write(self, iterator):
        """Stage, then wait."""
        message = super().write(iterator)
        context = TaskContext.get()
        if context.attemptNumber() == 0 and context.partitionId() == 1:
            time.sleep(SLOW_S)
        return message


def source(kind, writer_class):
    """Return a data source whose writer is another one."""

    class Source(reef.spark.ReefSource):
        @classmethod
        def name(cls):
            return kind

        def writer(self, schema, overwrite):
            return writer_class(self.options, schema, overwrite)

    return Source


def attempts(spark, url, options, kind, writer_class):
    """Write with a task that runs twice, and both of them upload."""
    started = time.monotonic()
    write(spark, url, options, kind, writer_class)
    emit(kind, seconds=time.monotonic() - started)


def write(spark, url, options, kind, writer_class, **wanted):
    """Write with another writer, into a namespace of its name."""
    spark.dataSource.register(source(kind, writer_class))
    given = {f"store.{name}": str(value) for name, value in options.items()}
    given |= {"namespace": kind, "key": "id", **wanted}
    numbers(spark).write.format(kind).options(**given).mode("append").save(url)


# --- the driver's own end -----------------------------------------------------------------


class Dies(ReefWriter):
    """Kills the driver at its commit: the JVM that runs this process, and the program."""

    victims = ()
    after = False

    def commit(self, messages):
        """Commit or not, then kill."""
        if self.after:
            super().commit(messages)
        for victim in self.victims:
            os.kill(victim, signal.SIGKILL)
        time.sleep(60)  # its pipes are gone, and so is a process that would continue


def dies_writing(url, options, *, after):
    """Write a DataFrame, and be killed before or after the commit."""
    spark = session("local[2]")
    Dies.victims = (spark.sparkContext._gateway.proc.pid, os.getpid())
    Dies.after = after
    emit("writing", after=after)
    write(spark, url, options, "dies", Dies, idempotencyKey="k")


def dies(spark, url, options, name, *, after):
    """Load, and be killed before or after the commit."""
    commit = BulkJob.commit

    def killed_there(self, staged, **options):
        if after:
            commit(self, staged, **options)
        emit("dying", after=after, segments=len(staged))
        os.kill(os.getpid(), signal.SIGKILL)

    BulkJob.commit = killed_there
    wanted = {"key": "id", "idempotency_key": "k", "store_options": options}
    reef.spark.bulk_load(numbers(spark), url, name, partitions=2, count=False, **wanted)


def connect(url):
    """Append, overwrite and bulk load over Spark Connect."""
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    df = numbers(spark, 2)
    df.write.format("reef").options(namespace="c", key="id").mode("append").save(url)
    appended = reef.open(url).reader("c")
    emit("append", rows=sum(1 for _ in appended.scan()))
    small = df.where("n < 50")
    small.write.format("reef").options(namespace="c").mode("overwrite").save(url)
    emit("overwrite", rows=sum(1 for _ in reef.open(url).reader("c").scan()))
    try:
        df.union(small).write.format("reef").options(namespace="c").mode("append").save(url)
    except Exception as error:
        emit("refused", clearly="keys of this load occur more than once" in str(error))
    try:
        df.union(small).write.format("reef").options(namespace="d", key="id").mode("append").save(
            url
        )
    except Exception:
        emit("taken back", left=reef.open(url).namespaces())
    report = reef.spark.bulk_load(df, url, "c", partitions=2)
    emit("bulk_load", rows=report.rows, segments=report.segments, module=type(df).__module__)
    again = reef.spark.bulk_load(small, url, "c2", key="id", progress=lambda step: None)
    emit("partitions", chosen=again.partitions)
    spark.stop()


@contextmanager
def two_hosts():
    """Run a master and two workers, on addresses of their own; give the master's."""
    program = Path(pyspark.__file__).parent / "bin" / "spark-class"
    port = free_port()
    environment = {**os.environ, "SPARK_WORKER_DIR": os.getcwd()}
    environment.pop("SPARK_LOCAL_IP", None)
    master = ["org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", str(port)]
    commands = [[*master, "--webui-port", str(free_port())]]
    for host in ("127.0.0.1", "127.0.0.2"):
        worker = ["org.apache.spark.deploy.worker.Worker", f"spark://127.0.0.1:{port}"]
        limits = ["--cores", "1", "--memory", "1g", "--webui-port", str(free_port())]
        commands.append([*worker, "--host", host, *limits])
    running = [
        subprocess.Popen([program, *command], env=environment, stderr=subprocess.DEVNULL)
        for command in commands
    ]
    try:
        yield f"spark://127.0.0.1:{port}"
    finally:
        for process in running:
            process.kill()
            process.wait()


def speculate(url):
    """A task that takes long is run a second time concurrently; both upload."""
    config = {
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.minTaskRuntime": "1s",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
        "spark.cores.max": "2",
    }
    with two_hosts() as master:
        spark = session(master, **config)
        attempts(spark, url, {}, "slowonce", SlowOnce)
        spark.stop()


def main(what, url, options="{}"):
    """Run the requested scenarios."""
    options = json.loads(options)
    if what == "connect":
        connect(url)
    elif what == "dies":
        dies(session("local[2]"), url, options, "before", after=False)
    elif what.startswith("write-"):
        dies_writing(url, options, after=what == "write-after")
    elif what == "speculate":
        speculate(url)
    else:
        spark = session("local-cluster[2,1,1024]")
        attempts(spark, url, options, "failsonce", FailsOnce)
        executor_killed(spark, url, options)
        executor_killed_in_compaction(spark, url, options)
        dies(spark, url, options, "after", after=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
