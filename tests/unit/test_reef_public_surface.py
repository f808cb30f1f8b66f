"""The public names: additions and removals are decisions, not accidents."""

import pytest

import reef

NAMES = """
    AsOf Batch Change ChangeCursor ClosedError Condition ConditionFailedError ConflictError
    CorruptionError Database FencedError IndexDefinition InternalError InvalidInputError
    LocalReceipt LocalWriter NamespaceInfo NotFoundError Operand OutcomeUnknownError PinnedReader
    Reader Receipt ReefError Snapshot Transaction UnavailableError UnsupportedFormatError Writer
    __version__ absent add
    catalog equals filter_index jobs keys max_ min_ open present stores text_index union
    vector_index
"""
READS = """
    count dataset get get_many namespace scan scan_arrow schema search to_arrow to_pandas to_polars
"""
WRITES = """
    background close delete delete_range delete_where flush is_open merge merge_rows
    patch put recovery refresh resolve transaction unfolded update_where upsert write
"""
METHODS = {
    "Batch": "delete delete_range merge merge_rows patch put upsert",
    "ChangeCursor": "close commit follow position",
    "Condition": "column key kind value",
    "Database": """
        alter branch bucket_snapshots close create cursor cursors diff drop drop_cursor history info
        jobs merge namespaces reader release_snapshot_all rename rollback
        snapshot snapshot_all snapshots snapshots_all sql sql_stream stats undrop writer
    """,
    "LocalWriter": f"{READS} {WRITES} pending",
    "NamespaceInfo": """
        bytes facts fingerprint generation indexes key name rows schema schema_id segments wal_floor
        writer_epoch
    """,
    "PinnedReader": f"{READS} close generation last_lsn pinned",
    "Reader": f"{READS} as_of changes changes_arrow close damage last_lsn refresh wait_for",
    "Receipt": "epoch idempotency_key index lsn namespace ops replayed wait write_id",
    "Snapshot": "expires_at extend generation id name release",
    "Transaction": f"""
        {READS} commit delete delete_range merge merge_rows patch put receipt rollback upsert
    """,
    "Writer": f"{READS} {WRITES}",
}
ON_INSTANCES = {"namespace", "background"}
"""Attributes of instances, which `dir` of a class does not list."""


def test_the_names_of_the_package():
    """`reef.__all__` has exactly the documented names."""
    kinds = {"Kind", "ErrorKind"}
    assert set(reef.__all__) - kinds == set(NAMES.split())


@pytest.mark.parametrize("name", METHODS)
def test_the_methods_of_handles(name):
    """Every public method is meant for users; parts of the engine have an underscore."""
    public = {n for n in dir(getattr(reef, name)) if not n.startswith("_")}
    assert public - ON_INSTANCES == set(METHODS[name].split()) - ON_INSTANCES
