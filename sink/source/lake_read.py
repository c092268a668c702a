"""Reads that take a table's copy in a lake, and from the servers what has changed since.

The lake at its cut, without the rows that changed since, and these rows as they are at a later cut:
that is the table at the later cut.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from foundation.errors import CutTooOld, InvalidInput
from foundation.ids import BucketId
from merge_engine.encoding.keys import KeyCodec
from merge_engine.schema.schema import Schema
from recovery.reader.cut import Cut
from recovery.reader.cut_between import Piece
from server.client.changelog import pieces_between
from server.client.remote_table import RemoteTable
from sink.lake.fields import dropped_columns, lake_fields
from sink.lake.files import encoded_keys, read_rows
from sink.lake.opening import Place, find_lake, load_unaltered
from sink.lake.state import LakeFile, LakeState
from sink.source.grouping import grouped
from sink.source.schemas import CHANGE_TYPE, UPSERT
from sink.source.tasks import ReadRows, ReadUpserts, TableTask, Wanted

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReadCopy:
    """Read rows of a copy, as they are there; `names`: by the name in the files, that to show."""

    place: Place
    files: tuple[LakeFile, ...]
    names: Mapping[str, str]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows of all files."""
        storage = self.place.storage
        for file in self.files:
            rows = read_rows(storage, file, list(self.names))
            shown = rows.rename_columns([self.names[name] for name in rows.schema.names])
            yield from shown.to_batches()


@dataclass(frozen=True, kw_only=True)
class ReadUnion(TableTask):
    """Read the rows of buckets: from the copy what has not changed since, the rest at a cut.

    `changed`: the buckets where something has; of the others, the copy is all.
    """

    buckets: tuple[BucketId, ...]
    changed: frozenset[BucketId]
    since: Cut
    until: Cut
    copy: ReadCopy

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows that changed, as they are at the later cut, and then the others."""
        self.wanted.check()
        schema = self.wanted.table.schema
        names = [column.name for column in schema.key_columns]
        codec = KeyCodec([column.type for column in schema.key_columns])
        keys: list[pa.BinaryArray] = []
        for batch in self._upserts().batches():
            keys.append(encoded_keys(batch, names, codec))
            there = batch.filter(pc.equal(batch.column(CHANGE_TYPE), UPSERT))
            yield there.drop_columns([CHANGE_TYPE])
        changed = pa.concat_arrays(keys) if keys else None
        for batch in self.copy.batches():
            if changed is None:
                yield batch
                continue
            is_old = pc.is_in(encoded_keys(batch, names, codec), value_set=changed)
            yield batch.filter(pc.invert(is_old))

    def _upserts(self) -> ReadUpserts:
        some = tuple(bucket for bucket in self.buckets if bucket in self.changed)
        return ReadUpserts(
            wanted=self.wanted,
            buckets=some,
            since=self.since.only(some),
            until=self.until.only(some),
            of_any_column=True,
            all_or_nothing=True,
        )


def plan_union(
    table: RemoteTable, wanted: Wanted, place: Place, at: Cut | None
) -> Sequence[TableTask]:
    """Return the tasks that read a table at a cut, one of now unless it is given, with its copy.

    Buckets that the copy does not have come from the servers, and so does everything if the log no
    longer has what came after the copy.
    """
    state = _load(table, place)
    until = table.cut() if at is None else table.definition.check_cut(at)
    table.refresh()  # A column that was dropped before the cut took rows along.
    since = state.mark.cut
    if not since.is_before(until):
        raise InvalidInput(
            f"the copy at {place.location} is at {since!r}, which is later than {until!r}: leave "
            "`at`, or `lake`"
        )
    pieces = _pieces(table, since, until, place) if _has_all_rows(state, table, place) else None
    copied = {file.bucket for file in state.files.values()} if pieces is not None else set()
    buckets = list(pieces) if pieces is not None else table.caller.bucket_ids(until)
    sizes = dict.fromkeys(copied, 0)
    for file in state.of_buckets(copied):
        sizes[file.bucket] += file.live
    names = _names(state, wanted)
    tasks: list[TableTask] = [
        ReadUnion(
            wanted=wanted,
            buckets=some,
            changed=frozenset(one for one in some if (pieces or {})[one]),
            since=since.only(some),
            until=until.only(some),
            copy=ReadCopy(place=place, files=state.of_buckets(some), names=names),
        )
        for some in grouped([one for one in buckets if one in copied], sizes)
    ]
    return tasks + [
        ReadRows(wanted=wanted, buckets=some, cut=until.only(some))
        for some in grouped([one for one in buckets if one not in copied], {})
    ]


def _load(table: RemoteTable, place: Place) -> LakeState:
    state = load_unaltered(find_lake(place))
    assert state is not None, "a lake that was found has versions"
    if state.mark.table != table.definition.uid:
        whose = f"table {state.mark.name}, and not of {table.name}"
        if state.mark.name == table.name:
            whose = f"another table {table.name}: it was dropped, and created anew"
        raise InvalidInput(f"{place.location} has a copy of {whose}")
    return state


def _has_all_rows(state: LakeState, table: RemoteTable, place: Place) -> bool:
    """Whether what has changed since a copy is all in the log: rows that a column took is not."""
    dropped = dropped_columns(state.mark.schema, table.schema)
    if dropped:
        logger.warning(
            "table %s is read from the servers alone: column '%s' was dropped since the copy at "
            "%s was made",
            *(table.name, dropped[0], place.location),
        )
    return not dropped


def _pieces(
    table: RemoteTable, since: Cut, until: Cut, place: Place
) -> Mapping[BucketId, Sequence[Piece]] | None:
    """Return what has changed since the copy, by bucket; None if that is not known any more."""
    try:
        return pieces_between(table.caller, since, until)
    except CutTooOld as exc:
        logger.warning(
            "table %s is read from the servers alone: the copy at %s is too old (%s)",
            *(table.name, place.location, exc),
        )
        return None


def _names(state: LakeState, wanted: Wanted) -> dict[str, str]:
    """Return what is wanted of the copy: by the name of then, that of now."""
    schema = wanted.table.schema
    now = {str(one.id): one.name for one in (*schema.key_columns, *schema.values(wanted.columns))}
    return {name: now[told] for name, told in state.mark.columns.items() if told in now}


# --- A version of the lake, without the cluster ---------------------------------------------------


def version_schema(place: Place, version: int, table: str | None) -> Schema:
    """Return the schema that the table had, under which a version of its copy was made.

    `table`: what it is to be a copy of; InvalidInput if it is of another.
    """
    mark = _version(place, version).mark
    if table not in (None, mark.name):
        raise InvalidInput(f"{place.location} has a copy of table {mark.name}, not of {table}")
    return mark.schema


def plan_version(place: Place, version: int, columns: Sequence[str]) -> list[ReadCopy]:
    """Return the tasks that read a version of a copy, as it was; no server is asked."""
    state = _version(place, version)
    known = lake_fields(state.mark.schema, states=state.mark.states).arrow.names
    names = {name: name for name in known if name in columns}
    sizes: dict[BucketId, int] = {}
    for file in state.files.values():
        sizes[file.bucket] = sizes.get(file.bucket, 0) + file.live
    return [
        ReadCopy(place=place, files=state.of_buckets(some), names=names)
        for some in grouped(sorted(sizes), sizes)
    ]


def _version(place: Place, version: int) -> LakeState:
    state = load_unaltered(find_lake(place), version)
    assert state is not None, "a lake that was found has versions"
    return state
