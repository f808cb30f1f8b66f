"""Importing Reef loads little: modules are counted, since seconds depend on the machine."""

import os
import subprocess
import sys

import pytest

HEAVY = """
    aiohttp asyncio boto3 botocore click duckdb email http multiprocessing obstore opentelemetry
    pandas polars pyspark rich ssl
    pyarrow.acero pyarrow.csv pyarrow.dataset pyarrow.json pyarrow.parquet
    reef.aio reef.cli reef.engine.local reef.jobs.background reef.jobs.compact reef.jobs.fold
    reef.jobs.repair reef.jobs.verify reef.locallog reef.spark reef.testing
"""


def loaded(program):
    """Return the modules that a program has loaded in an interpreter of its own."""
    program += "\nimport sys\nprint(*sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return set(done.stdout.split())


def test_importing_reef_loads_neither_arrow_nor_the_engine():
    """Names are resolved on first use: `import reef` costs less than `import pyarrow`."""
    modules = loaded("import reef")
    assert {name for name in modules if name.startswith("reef")} == {"reef", "reef._version"}
    assert not modules & {"pyarrow", "numpy"}


@pytest.mark.parametrize(
    "program",
    [
        "import reef; reef.open('memory://')",
        "import reef; reef.open('memory://').writer('users', background=False).put('a', b'1')",
    ],
)
def test_opening_a_bucket_loads_only_its_parts(program):
    """No optional package, no other store, no job and no command line."""
    assert sorted(loaded(program) & set(HEAVY.split())) == []


def test_opening_a_bucket_loads_no_registry():
    """The catalog of namespaces is loaded by the first program line that lists or creates one."""
    assert "reef.catalog" not in loaded("import reef; reef.open('memory://')")


UNCACHED = ("PYTHONDONTWRITEBYTECODE",)
"""An installed package has its bytecode; without this each round would compile all sources."""
IMPORT_S = """
import time
before = time.process_time()
{}
print(time.process_time() - before)
"""


def import_s(program, bytecode):
    """Return the CPU time of a program without the start of its interpreter."""
    command = [sys.executable, "-c", IMPORT_S.format(program)]
    cached = {name: value for name, value in os.environ.items() if name not in UNCACHED}
    cached["PYTHONPYCACHEPREFIX"] = str(bytecode)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=True, env=cached
    )
    return float(done.stdout)


@pytest.mark.quiet
@pytest.mark.parametrize(
    ("program", "ratio"), [("import reef", 0.5), ("import reef; reef.open('memory://')", 4)]
)
def test_imports_cost_little_next_to_arrow(program, ratio, tmp_path):
    """CPU time next to that of `import pyarrow`, in turns: the best of several rounds."""
    arrow = "import pyarrow"
    rounds = (import_s(program, tmp_path) / import_s(arrow, tmp_path) for _ in range(8))
    assert any(found <= ratio for found in rounds)


def test_jobs_are_loaded_one_by_one():
    """A job does not load the others, and hides the package of its name."""
    modules = loaded("from reef.jobs import fold; assert callable(fold)")
    assert "reef.jobs.fold.job" in modules
    assert not modules & {"reef.jobs.repair.job", "reef.jobs.rebuild", "reef.jobs.transfer"}
    loaded("import reef.jobs.fold.job; from reef.jobs import fold; assert callable(fold)")
    loaded(
        "import reef; reef.jobs.sweep; import reef.jobs.sweep.job; assert callable(reef.jobs.sweep)"
    )
