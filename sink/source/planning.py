"""How a batch read is made of tasks: which buckets or keys each of them reads, all at one cut."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foundation.errors import InvalidInput
from foundation.ids import BucketId
from merge_engine.merging.routing import route
from recovery.reader.cut import Cut
from recovery.reader.isolation import Isolation
from server.client.changelog import estimated_rows
from server.client.cluster import Recipe
from server.client.remote_table import RemoteTable
from sink.lake.opening import Place
from sink.source.grouping import grouped
from sink.source.lake_read import plan_union
from sink.source.options import ReaderOptions
from sink.source.pruning import Allowed, Pruned, both, prune, wanted_values
from sink.source.tasks import ReadKeys, ReadRows, TableTask, Wanted


@dataclass(frozen=True, kw_only=True)
class RowsPlan:
    """What is wanted of a table: columns of the key and others; at which cut, by which lease.

    `keys`: by column of the key, the only values that are wanted, as JSON has them. `allowed`: by
    column, the only values that can pass what is done with the rows. `lake`: where a copy of the
    table is, to be read in its place as far as it goes.
    """

    columns: Sequence[str]
    isolation: Isolation = Isolation.COMMITTED
    at: Cut | None = None
    lease: str | None = None
    keys: Allowed | None = None
    allowed: Allowed = field(default_factory=dict)
    lake: Place | None = None

    @classmethod
    def of(
        cls, options: ReaderOptions, columns: Sequence[str], allowed: Allowed | None = None
    ) -> "RowsPlan":
        """Return what options say, of these columns."""
        return cls(
            columns=columns,
            isolation=options.isolation,
            at=options.at,
            lease=options.lease,
            keys=options.keys,
            allowed=allowed or {},
            lake=options.lake,
        )


def plan_rows(table: RemoteTable, recipe: Recipe, plan: RowsPlan) -> list[TableTask]:
    """Return the tasks that read it, all at one cut, which is taken now unless it is given."""
    schema = table.schema
    values = tuple(name for name in plan.columns if schema.column(name).function is not None)
    wanted = Wanted(recipe=recipe, table=table.definition, columns=values)
    if plan.lake is not None:
        return list(plan_union(table, wanted, plan.lake, plan.at))
    cut = _cut(table, plan)
    keys = {} if plan.keys is None else wanted_values(schema, plan.keys)
    pruned = prune(schema, both(keys, plan.allowed))
    if pruned.keys is not None and plan.lease is None:
        return [ReadKeys(wanted=wanted, cut=cut, keys=pruned.keys)] if pruned.keys.num_rows else []
    held = {} if plan.lease is None else table.borrow_lease(plan.lease).snapshots
    buckets = _buckets(table, pruned, cut)
    sizes = estimated_rows(table.caller, buckets) if len(buckets) > 1 else {}
    # The cut may be later than the lease: what has come since is read from the leaders.
    shares = [([one for one in buckets if one in held], plan.lease)]
    shares += [([one for one in buckets if one not in held], None)]
    return [
        ReadRows(
            wanted=wanted,
            cut=None if cut is None else cut.only(some),
            buckets=some,
            lease=lease,
        )
        for share, lease in shares
        for some in grouped(share, sizes)
    ]


def _buckets(table: RemoteTable, pruned: Pruned, cut: Cut | None) -> list[BucketId]:
    """Return the buckets that can have rows which pass, at the cut."""
    if pruned.keys is not None:
        keys = [column.combine_chunks() for column in pruned.keys.columns]
        routes = route(table.schema, keys, table.buckets)
        return sorted(bucket for bucket, _ in table.caller.find_all(routes, cut))
    return table.caller.bucket_ids(cut, pruned.partitions)


def _cut(table: RemoteTable, plan: RowsPlan) -> Cut | None:
    if plan.at is not None:
        if plan.isolation is not Isolation.COMMITTED:
            raise InvalidInput("`at` a cut there is what was committed: leave `isolation`, or `at`")
        return table.definition.check_cut(plan.at)
    return table.cut() if plan.isolation is Isolation.COMMITTED else None
