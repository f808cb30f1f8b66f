"""`reef catalog …` on the command line."""

import json

from reef import catalog as catalogs


def test_an_intact_catalog_is_reported_with_its_figures(cli, tmp_path):
    """The registry of a bucket by default; exit code 0."""
    url = str(tmp_path / "data")
    catalogs.open(url, prefix="catalog").transact(lambda session: session.put("a", b"1"))
    ran = cli("catalog", "verify", url, "--output", "json")
    assert ran.code == 0
    report = json.loads(ran.out)
    assert (report["keys"], report["transactions"], report["problems"]) == (1, 1, [])
    assert "keys" in cli("catalog", "verify", url).out


def test_damage_is_reported_with_its_position(cli, tmp_path):
    """Object and offset, and exit code 2."""
    url = str(tmp_path / "data")
    catalog = catalogs.open(url)
    catalog.transact(lambda session: session.put("a", b"1"))
    name = next(info.key for info in catalog.store.list("segments/"))
    catalog.store.put(name, catalog.store.get(name)[:-1])
    ran = cli("catalog", "verify", url, "--prefix", "", "--output", "json")
    assert ran.code == 2
    [problem] = json.loads(ran.out)["problems"]
    assert problem["object"] == name
    assert "offset" in problem["message"]
    assert name in cli("catalog", "verify", url, "--prefix", "").out
