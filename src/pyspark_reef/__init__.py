"""Spark finds packages of this kind by their name, and registers their source by itself.

So `spark.read.format("reef")` works wherever Reef is installed, from Spark 4.0 on. Elsewhere
`reef.spark.register(spark)` does the same by hand.
"""

from reef.spark.source import ReefSource as DefaultSource

__all__ = ["DefaultSource"]
