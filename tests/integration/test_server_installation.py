"""The installer is careful with the machine and reports the steps it could not do."""

import pytest

from tests.support.servers import install


def test_policy_is_written_and_removed(tmp_path):
    """While packages are installed, a policy forbids to start services; afterwards it is gone."""
    path = tmp_path / "policy-rc.d"
    with install.no_services_started(path):
        assert path.stat().st_mode & 0o111
        assert "exit 101" in path.read_text()
    assert not path.exists()


def test_foreign_policy_stays(tmp_path):
    """A policy that another program wrote is neither changed nor removed."""
    path = tmp_path / "policy-rc.d"
    path.write_text("#!/bin/sh\nexit 0\n")
    with install.no_services_started(path):
        assert path.read_text() == "#!/bin/sh\nexit 0\n"
    assert path.exists()


def test_own_leftover_policy_is_removed(tmp_path):
    """A policy that an interrupted run left behind does not stay for ever."""
    path = tmp_path / "policy-rc.d"
    path.write_text(install.POLICY)
    with install.no_services_started(path):
        assert path.exists()
    assert not path.exists()


def test_failing_command_says_why(tmp_path, monkeypatch):
    """The reason is the program's own last words, not the whole log."""
    monkeypatch.setattr(install, "LOG_PATH", tmp_path / "deep" / "install.log")
    install.command(["echo", "E: of an earlier command"])
    with pytest.raises(install.InstallError, match=r"^E: no such package$"):
        install.command(["sh", "-c", "echo reading; echo E: no such package; echo; exit 100"])


def test_attempts_are_bounded(monkeypatch):
    """What fails for good is tried three times."""
    monkeypatch.setattr(install, "RETRY_PAUSE_S", 0)
    attempts = []

    def fail():
        attempts.append(1)
        raise install.InstallError("no")

    with pytest.raises(install.InstallError):
        install.retry(fail)
    assert len(attempts) == install.ATTEMPTS_MAX


def test_one_bad_part_does_not_take_the_others_along(monkeypatch):
    """When all parts together fail, each is tried alone, and only the bad one is reported."""
    monkeypatch.setattr(install, "RETRY_PAUSE_S", 0)
    monkeypatch.setattr(install, "apt_refuses", lambda: None)
    monkeypatch.setattr(install, "no_services_started", install.contextlib.nullcontext)

    def apt(verb, *packages):
        if "strace" in packages:
            raise install.InstallError("E: no strace here")

    monkeypatch.setattr(install, "apt", apt)
    assert install.apt_install(["strace", "mariadb"]) == {"strace": "E: no strace here"}


def test_without_root_the_error_says_so(monkeypatch):
    """Without root nothing is tried, and the reason says so."""
    monkeypatch.setattr(install, "apt_refuses", lambda: "packages are installed by root only")
    monkeypatch.setattr(install, "missing", lambda name: "no strace")
    reasons = install.apt_install(["strace"])
    assert reasons == {"strace": "no strace; packages are installed by root only"}
