"""A short soak; `make soak` has the long one."""

import pytest

from tests.soak.run import Soak
from tests.support.registers import register_url, unconditional_bucket


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_nothing_acknowledged_is_lost_under_kills(tmp_path, ministack):
    """A writer, a loader, readers and jobs on an S3 server, all killed again and again."""
    ministack.make_bucket("soak")
    report = Soak("s3://soak/short", ministack.options(), tmp_path, 15.0).run()
    assert report["kills"] >= 3
    assert report["acknowledged"] > 10


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nothing_acknowledged_is_lost_under_kills_with_a_register(tmp_path, servers):
    """The same on a server that ignores every condition: a register decides, and recovery runs."""
    (tmp_path / "notes").mkdir()
    options = unconditional_bucket(servers, "soak-two-phase")
    options["cas"] = register_url(servers, "sqlite", tmp_path)
    report = Soak("s3://soak-two-phase/short", options, tmp_path / "notes", 15.0).run()
    assert report["kills"] >= 3
    assert report["acknowledged"] > 10
