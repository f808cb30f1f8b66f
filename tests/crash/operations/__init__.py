"""The operations of the crash matrix, by area: one module for each, found by importing them all.

A module has `OPERATIONS`, a list, and if there are named points that no operation of the matrix
can reach, `ELSEWHERE`: which test dies at them instead. To cover a new area is to put a module
here; to cover a new crash point in an operation that is here already, nothing is to be done.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import reef

NAME = "users"
OWN_TABLES = {
    "catalog/": "tests/**/test_catalog*.py",
    "engine/local/": "tests/crash/test_local_*.py",
    "locallog/": "tests/unit/locallog/test_*.py",
    "stores/two_phase": "tests/**/test_two_phase*.py",
}
"""Areas that have no namespace to reopen: which tests kill their processes."""
ABSENT = None


@dataclass
class Ledger:
    """Rows that may be read after a crash: by key, the last acknowledged value or a later one."""

    allowed: dict[bytes, list[Any]] = field(default_factory=dict)

    def sent(self, key, value):
        """A write is on its way: from now on its value may be there, or the one before."""
        self.allowed.setdefault(key, [ABSENT]).append(value)

    def acknowledged(self, key, value):
        """It is acknowledged: nothing that was sent before it may be there any more."""
        values = self.allowed[key]
        self.allowed[key] = values[len(values) - 1 - values[::-1].index(value) :]

    def noted(self, rows):
        """Rows that are there for certain."""
        self.allowed |= {key: [value] for key, value in rows.items()}

    def settle(self, seen, where):
        """Check the rows that are read, and expect these from now on."""
        unknown = set(seen) - set(self.allowed)
        assert not unknown, f"{unknown} from nowhere, {where}"
        for key, values in self.allowed.items():
            assert seen.get(key, ABSENT) in values, f"{key} is {seen.get(key)}, {where}"
        self.noted({key: seen.get(key, ABSENT) for key in self.allowed})

    def rows(self):
        """Return the rows, once all outcomes are known."""
        assert all(len(values) == 1 for values in self.allowed.values())
        return {key: values[0] for key, values in self.allowed.items() if values[0] is not ABSENT}

    def copy(self):
        """Return a copy that later operations do not change."""
        return Ledger({key: list(values) for key, values in self.allowed.items()})


@dataclass
class Hand:
    """The arguments of an operation: a database, the ledger, and time."""

    db: reef.Database
    ledger: Ledger
    sleep: Callable[[float], None]
    facts: dict[str, Any] = field(default_factory=dict)
    """Results of the preparation, for the work."""

    def write(self, writer, rows, **options):
        """Put or, with None, delete rows, one batch each, and wait for each acknowledgement."""
        for key, value in rows.items():
            self.ledger.sent(key, value)
            if value is ABSENT:
                writer.delete(key, **options)
            else:
                writer.put(key, value, **options)
            self.ledger.acknowledged(key, value)

    def put(self, rows, **settings):
        """Write rows with a writer of their own."""
        with self.db.writer(NAME, background=False, **settings) as writer:
            self.write(writer, rows)


def nothing(hand):
    """Do nothing."""


@dataclass(frozen=True)
class Operation:
    """A row of the matrix: the preparation, and the work up to the crash."""

    name: str
    work: Callable[[Hand], None]
    prepare: Callable[[Hand], None] = nothing
    recover: Callable[[Hand], None] = nothing
    """Repairs by an operator after a crash, before the namespace is used again."""
    also: Callable[[Hand], None] = nothing
    """What must hold besides, as soon as it is in service."""
    again: Callable[[Hand], None] | None = None
    """How it is run once more after a death; None: as it was the first time."""
    reaches: tuple[str, ...] = ()
    """Named points that this operation is here for."""

    def __str__(self):
        return self.name


def modules():
    """Return the modules of all areas."""
    names = [found.name for found in pkgutil.iter_modules(__path__)]
    return [importlib.import_module(f"{__name__}.{name}") for name in sorted(names)]


def operations():
    """Return the operations of all areas."""
    return [operation for module in modules() for operation in module.OPERATIONS]


def elsewhere():
    """Return the named points that have a test of their own, and which."""
    return {
        point: test
        for module in modules()
        for point, test in getattr(module, "ELSEWHERE", {}).items()
    }
