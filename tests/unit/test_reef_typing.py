"""Type hints: what strict mypy makes of a program that uses the whole public face."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
from mypy import api

import reef
import reef.aio
from reef.config import (
    CompactOptions,
    CompactSettings,
    FoldOptions,
    FoldSettings,
    IngestOptions,
    IngestSettings,
    ReaderOptions,
    ReaderSettings,
    SweepOptions,
    SweepSettings,
    WriterOptions,
    WriterSettings,
)

ROOT = Path(__file__).parent.parent.parent
TYPED = ROOT / "examples" / "typed.py"

MISTAKES = '''
"""Each ignored line is a mistake; strict mypy complains about an ignore without one."""

import reef
import reef.aio


def sync(db: reef.Database, users: reef.Writer) -> None:
    users.put("a", b"1", wait=False).lsn  # type: ignore[attr-defined]
    users.put("a", b"1").result()  # type: ignore[attr-defined]
    users.put("a", 17)  # type: ignore[call-overload]
    users.put("a", b"1", colour="red")  # type: ignore[call-overload]
    users.get(17)  # type: ignore[arg-type]
    users.scan(limit="ten")  # type: ignore[arg-type]
    users.resolve(17)  # type: ignore[arg-type]
    db.reader("users", pin=True).refresh()  # type: ignore[attr-defined]
    db.reader("users").put("a", b"1")  # type: ignore[attr-defined]
    db.info(17)  # type: ignore[arg-type]
    db.writer("users", group_window=5)  # type: ignore[call-overload]
    db.writer("users", max_parallel_writes="two")  # type: ignore[call-overload]
    db.writer("users", durability="local")  # type: ignore[call-overload]
    db.writer("users").pending  # type: ignore[attr-defined]
    db.writer("users", durability="local", local_log="log").pending.batches
    db.reader("users", refresh_interval=5)  # type: ignore[call-overload]
    db.reader("users", pin=True, cache_bytes="all")  # type: ignore[call-overload]
    reef.Batch().put("a")  # type: ignore[call-arg]


async def aio(db: reef.aio.Database, users: reef.aio.Writer) -> None:
    (await users.put("a", b"1")).result()  # type: ignore[attr-defined]
    await users.put("a", b"1", colour="red")  # type: ignore[call-arg]
    await users.put("a", b"1", wait=False)  # type: ignore[call-arg]
    users.get_many(["a"]).column("a")  # type: ignore[attr-defined]
    await users.resolve(17)  # type: ignore[arg-type]
    users.scan(limit="ten")  # type: ignore[arg-type]
    for _ in users.scan():  # type: ignore[attr-defined]
        pass
    await (await db.reader("users", pin=True)).refresh()  # type: ignore[attr-defined]
    await db.info(17)  # type: ignore[arg-type]
'''


def check(path):
    """Run strict mypy on one file, with the project's own settings."""
    said, failed, code = api.run(
        ["--strict", "--config-file", str(ROOT / "pyproject.toml"), str(path)]
    )
    assert code == 0, said + failed


def test_the_typed_example_has_its_declared_types(monkeypatch):
    """Every `assert_type` of the example holds: an editor knows what each call gives."""
    monkeypatch.chdir(ROOT)
    assert TYPED.read_text().count("assert_type(") > 40
    check(TYPED)


def test_the_typed_example_runs(tmp_path):
    """It is a real program: on a directory and in memory its values match its types."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(TYPED)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "users: [b'u3', b'u2']" in done.stdout
    assert "served 100" in done.stdout


def test_mistakes_are_seen(tmp_path, monkeypatch):
    """What would fail when it runs is underlined while it is written."""
    monkeypatch.chdir(ROOT)
    path = tmp_path / "mistakes.py"
    path.write_text(MISTAKES)
    check(path)


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (WriterOptions, WriterSettings),
        (ReaderOptions, ReaderSettings),
        (FoldOptions, FoldSettings),
        (IngestOptions, IngestSettings),
        (CompactOptions, CompactSettings),
        (SweepOptions, SweepSettings),
    ],
)
def test_an_editor_knows_every_setting(options, settings):
    """Handles and jobs accept exactly the fields of their settings, with their types."""
    assert get_type_hints(options) == get_type_hints(settings)


@pytest.mark.parametrize(
    ("face", "engine"),
    [
        (reef.aio.Reader.get_many, reef.Reader.get_many),
        (reef.aio.Writer.scan, reef.Writer.scan),
        (reef.aio.Writer.resolve, reef.Writer.resolve),
        (reef.aio.Database.create, reef.Database.create),
    ],
)
def test_help_shows_the_arguments(face, engine):
    """`help()` and editors show the engine's own names, defaults and words."""
    assert inspect.signature(face).parameters.keys() == inspect.signature(engine).parameters.keys()
    assert face.__doc__ == engine.__doc__
