"""Running `reef` in this process: as the installed command does, without its start."""

from typing import NamedTuple

import pytest

from reef.cli.main import run


class Ran(NamedTuple):
    """The outcome of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys):
    """Return a function that runs a command line; paths and numbers may be given as they are."""

    def call(*words):
        capsys.readouterr()
        code = run([str(word) for word in words])
        return Ran(code, *capsys.readouterr())

    return call


@pytest.fixture
def data(tmp_path):
    """Return the directory of a bucket that is still empty."""
    return tmp_path / "data"
