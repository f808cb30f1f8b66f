"""A pytest plugin that spreads the tests over xdist's workers (`make test` asks for two).

A file's tests stay together, so that its fixtures are built once; all tests that need a
Spark session form one group, because a session takes ten seconds and a gigabyte. That group comes
first: it is the longest, and should not be the last to finish.

This is a scheduler of its own because `--dist loadgroup` has no effect with pytest 9.2: it renames
tests in a way that pytest ignores.

It also has Hypothesis try the same examples at every run, and without a clock: what `make test`
says depends on the code alone, not on chance and not on a machine that stalls. New examples are
found by `make slow` (`--hypothesis-profile=curious`).
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings

SPARK = "spark"

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("steady", PATIENT, derandomize=True)
settings.register_profile("curious", PATIENT, derandomize=False)
settings.load_profile("steady")


def group_of(test: str) -> str:
    """Which tests must run in one worker: the name that they share."""
    return SPARK if SPARK in test.lower() else test.partition("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring Spark's tests to the front."""
    items.sort(key=lambda item: group_of(item.nodeid) != SPARK)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out whole groups, in the order of collection."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)
