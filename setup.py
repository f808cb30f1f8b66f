"""Builds two optional parts: the kernel of reads, given a C compiler, and the native Spark reader,
given a JDK and pyspark. Without them everything works, more slowly."""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "jvm"))

import build as jar  # noqa: E402 - from the folder above


class BuildWithJar(build_py):
    """Compile the jar first; a jar that `make` has built before is packed as it is."""

    def run(self) -> None:
        target = ROOT / "src/reef/spark/reef-spark.jar"
        if not target.exists() and jar.missing() is None:
            jar.build(target)
        super().run()


KERNEL = Extension(
    "reef._kernel",
    ["src/reef/_kernel.c"],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    extra_compile_args=[] if sys.platform == "win32" else ["-O2", "-ffp-contract=off"],
    py_limited_api=True,
    optional=True,  # reef.kernel falls back to Python
)

setup(
    cmdclass={"build_py": BuildWithJar},
    ext_modules=[KERNEL],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
