"""Snapshots on demand: a call goes on for about a second, and is made again for what is left."""

from collections.abc import Sequence

from foundation.ids import BucketId
from server.client.steps import until_done
from server.client.table_caller import TableCaller
from server.protocol.calls import TakeSnapshots
from server.protocol.messages import NOT_THERE


def take_some(caller: TableCaller, buckets: Sequence[BucketId]) -> dict[BucketId, int | None]:
    """Ask the servers once; return the ids of the latest snapshots, None of what is left."""
    call = TakeSnapshots(
        table_id=caller.table.table_id,
        schema_version=caller.schema.version,
        buckets=tuple(buckets),
        some=True,
    )
    found = caller.call(call).results
    return {key: None if one == NOT_THERE else one for key, one in found.items()}


def take_all(caller: TableCaller, buckets: Sequence[BucketId]) -> dict[BucketId, int]:
    """Ask until there is a snapshot of each bucket; return the ids of the latest."""
    taken = until_done(
        dict.fromkeys(buckets, True),
        lambda rest: take_some(caller, list(rest)),
        lambda _, snapshot_id: True if snapshot_id is None else None,
    )
    return {key: one for key, one in taken.items() if one is not None}
