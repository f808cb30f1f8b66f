"""`reef --version` and `reef store probe`, as a person and as a program see them."""

import json

import pytest

import reef
from reef.cli.main import run
from tests.cli.process import call


def test_version():
    """The installed command prints its version."""
    assert call("--version") == (0, f"reef {reef.__version__}\n", "")


def test_probe_for_people(tmp_path):
    """A table with yes and no; no colour codes where there is no terminal."""
    code, out, err = call("store", "probe", str(tmp_path / "data"))
    assert (code, err) == (0, "")
    assert "create only holds" in out
    assert "yes" in out
    assert "\x1b[" not in out


@pytest.mark.parametrize(
    "words",
    [
        ("--output", "json", "store", "probe", "memory://"),
        ("store", "probe", "memory://", "--output", "json"),
    ],
)
def test_probe_for_programs(words):
    """--output json works before and behind the command."""
    code, out, _ = call(*words)
    facts = json.loads(out)
    assert code == 0
    assert facts["create_only_holds"] is True
    assert facts["requests_of_this_probe"]["put"] > 10


def test_probe_leaves_nothing_behind(tmp_path):
    """Without --remember the bucket is as empty as before; with it, it knows."""
    call("store", "probe", str(tmp_path / "data"))
    from reef import stores

    store = stores.open(str(tmp_path / "data"))
    assert list(store.list()) == []
    assert call("store", "probe", str(tmp_path / "data"), "--remember")[0] == 0
    assert [info.key for info in store.list()] == ["store/cas.json"]


def test_a_refused_store_exits_with_1(rclone):
    """The error goes to stderr and names the alternative."""
    rclone.make_bucket("cli")
    options = [f"-o{name}={value}" for name, value in rclone.options().items()]
    code, out, err = call("store", "probe", "s3://cli/x", *options)
    assert (code, out) == (1, "")
    assert "does not honour create-only" in err
    assert "cas=" in err


def test_errors_for_programs():
    """With --output json, errors are JSON too."""
    code, _, err = call("store", "probe", "ftp://x", "--output", "json")
    assert code == 1
    assert json.loads(err)["kind"] == "invalid_url"


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("nonsense",),
        ("store", "probe"),
        ("--nonsense",),
        ("store", "probe", "memory://", "--output", "xml"),
    ],
)
def test_usage_errors_exit_with_64(words):
    """A wrong command line is distinguished from a failure."""
    assert call(*words)[0] == 64


@pytest.mark.parametrize("option", ["endpoint", "=x", "retry=1", "meter=2"])
def test_bad_store_options(option):
    """Each is an error that names the option."""
    code, _, err = call("store", "probe", "memory://", "-o", option)
    assert code == 1
    assert "option" in err


def test_an_option_given_twice():
    """Which one would count?"""
    code, _, err = call("store", "probe", "memory://", "-o", "page=1", "-o", "page=2")
    assert code == 1
    assert "'page'" in err


def test_interrupting_exits_with_130(monkeypatch, capsys):
    """Ctrl-C is not a traceback."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("reef.cli.store.probe", interrupt)
    assert run(["store", "probe", "memory://"]) == 130
    assert "Traceback" not in capsys.readouterr().err


# --- recover ----------------------------------------------------------------------------


def unfinished(tmp_path):
    """Return the words for a bucket in which a writer died between its insert and its copy."""
    from reef import stores
    from reef.stores.two_phase import find_two_phase
    from reef.stores.two_phase.register import new_record

    cas = f"sqlite:///{tmp_path}/register.db"
    store = stores.open(str(tmp_path / "data"), cas=cas)
    two_phase = find_two_phase(store)
    record = new_record(store.runtime, "wal/1", b"bytes")
    two_phase.inner.put(record.source, b"bytes")
    two_phase.register.insert(record)
    return store, record, (str(tmp_path / "data"), "-o", f"cas={cas}")


def test_recover_finishes_and_says_what(cli, tmp_path):
    """A record that was left is finished, once; the second time there is nothing to do."""
    store, _, words = unfinished(tmp_path)
    code, out, err = cli("store", "recover", *words, "--output", "json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {"finished": ["wal/1"], "done": [], "stuck": []}
    assert store.get("wal/1") == b"bytes"
    code, out, _ = cli("store", "recover", *words)
    assert code == 0
    assert "wal/1" not in out


def test_recover_exits_with_2_if_bytes_are_nowhere(cli, tmp_path):
    """The record is named, and kept."""
    store, record, words = unfinished(tmp_path)
    store.inner.inner.delete(record.source)
    for _ in range(2):
        code, out, _ = cli("store", "recover", *words, "--output", "json")
        assert code == 2
        assert json.loads(out)["stuck"][0]["destination"] == "wal/1"


def test_recover_after_a_restore_removes_forgotten_sources(cli, tmp_path):
    """H72: a new incarnation; sources without a record go, those with one are finished."""
    from reef.stores.two_phase import find_two_phase
    from reef.stores.two_phase.register import new_record

    store, _, words = unfinished(tmp_path)
    register = find_two_phase(store).register
    before = register.incarnation()
    forgotten = new_record(store.runtime, "wal/2", b"forgotten").source
    store.inner.inner.put(forgotten, b"forgotten")
    code, out, err = cli("store", "recover", *words, "--restored", "--output", "json")
    assert (code, err) == (0, "")
    assert json.loads(out)["finished"] == ["wal/1"]
    assert json.loads(out)["sources_removed"] == [forgotten]
    assert register.incarnation() != before
    assert [info.key for info in store.inner.inner.list()] == ["wal/1"]


def test_recover_wants_the_bucket_s_own_register(cli, tmp_path):
    """Without one, or with another, there would be nothing to find: an error, and what to do."""
    assert cli("store", "recover", str(tmp_path / "data"))[0] == 1
    _, _, words = unfinished(tmp_path)
    assert cli("store", "probe", *words, "--remember")[0] == 0
    other = (words[0], "-o", f"cas=sqlite:///{tmp_path}/other.db")
    code, _, err = cli("store", "recover", *other)
    assert code == 1
    assert "the same register" in err


@pytest.mark.parametrize(
    ("command", "rest"),
    [
        (("catalog", "verify"), ()),
        (("namespaces",), ()),
        (("verify",), ("users",)),
        (("get",), ("users", "u1")),
        (("get",), ("unknown", "u1")),
    ],
)
def test_no_password_of_a_register_is_shown(cli, data, command, rest):
    """It is in the URL that was given; the output has the host, and not the password."""
    assert cli("put", "--create", data, "users", "u1", "Ada").code == 0
    ran = cli(*command, f"{data}?cas=postgresql://ada:geheim@127.0.0.1:1/x", *rest)
    assert ran.code in (0, 1, 2)
    assert "geheim" not in ran.out + ran.err
