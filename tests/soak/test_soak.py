"""A short soak; `make soak` has the long one."""

import pytest

from tests.soak.run import Soak


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_nothing_acknowledged_is_lost_under_kills(tmp_path, ministack):
    """A writer, a loader, readers and jobs on an S3 server, all killed again and again."""
    ministack.make_bucket("soak")
    told = Soak("s3://soak/short", ministack.options(), tmp_path, 15.0).run()
    assert told["kills"] >= 3
    assert told["acknowledged"] > 10
