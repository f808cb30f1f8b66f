"""How the sessions of tests are set up: for short jobs."""

JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"
"""Compiles quickly instead of well, and collects without threads of its own."""
QUICK = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": JVM,
    "spark.executor.extraJavaOptions": JVM,
    "spark.executor.memory": "512m",
}


def configured(builder, **config):
    """Return a builder with all that, and more."""
    for name, value in {**QUICK, **config}.items():
        builder = builder.config(name, value)
    return builder
