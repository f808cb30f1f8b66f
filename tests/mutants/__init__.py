"""Mutants: one-line protocol mistakes, each with the tests that must notice it.

A list of mistakes keeps the suite honest: a protection that no test misses is a protection that
the next change removes. The lists are TOML files in this directory, one per area:

    [[mutant]]
    id = "sender-believes-exists"
    file = "engine/commit/inflight.py"            # below src/reef
    old = "return not inflight.doubt and"           # must occur exactly once
    new = "return"
    killed_by = ["tests/hazards/test_late_objects.py::test_H66_…"]

`python -m tests.mutants` plants one at a time in a copy of the sources and runs its tests against
the copy; at least one of them has to fail. A mutant that lives is a missing test, or equivalent:
then it belongs in `equivalent.toml`, with the reason, and is not run.
"""
