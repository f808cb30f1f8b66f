"""The lists of mutants fit the sources; `make mutants` runs them."""

import ast
from collections import Counter
from functools import cache

from tests.mutants.catalogue import AREAS, EQUIVALENT, HERE, ROOT, SOURCES, load, load_all

MUTANTS = load_all()
EXPLAINED = load(EQUIVALENT)


def test_every_mutant_can_be_planted():
    """Its line is in the sources exactly once; the runner also compiles what takes its place."""
    texts, misplaced = {}, []
    for mutant in [*MUTANTS, *EXPLAINED]:
        if mutant.path not in texts:
            texts[mutant.path] = (SOURCES / mutant.path).read_text()
        try:
            mutant.apply(texts[mutant.path])
        except ValueError as error:
            misplaced.append(str(error))
    assert misplaced == []


def test_names_are_used_once():
    """A name says which one it is, everywhere."""
    names = Counter(mutant.name for mutant in [*MUTANTS, *EXPLAINED])
    assert [name for name, count in names.items() if count > 1] == []


def test_every_list_is_known():
    """A list that the runner does not read would never be run."""
    assert {path.stem for path in HERE.glob("*.toml")} <= {*AREAS, EQUIVALENT}


def test_every_mutant_names_tests_that_there_are():
    """A test that was renamed takes its mutants' entries along."""
    missing = []
    for mutant in MUTANTS:
        assert mutant.killed_by, mutant.name
        for test in mutant.killed_by:
            path, _, name = test.partition("::")
            names = _tests_in(path)
            if name and name.partition("[")[0].split("::")[-1] not in names:
                missing.append(f"{mutant.name}: {test}")
    assert missing == []


@cache
def _tests_in(path):
    tree = ast.parse((ROOT / path).read_text())
    defined = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    assigned = [t for n in tree.body if isinstance(n, ast.Assign) for t in n.targets]
    return {n.name for n in defined} | {t.id for t in assigned if isinstance(t, ast.Name)}


def test_equivalent_ones_say_why():
    """Equivalent mutants have a reason."""
    assert [mutant.name for mutant in EXPLAINED if len(mutant.reason) < 20] == []


def test_there_are_enough():
    """Protocol code has many lines on which data depends."""
    assert len(MUTANTS) >= 400
