"""The partitions of a table: which there are, and their ids.

One node per table has them all, as a document in the frame of `framing`, format 2: {"next": 1,
"partitions": {"<hex>": id}}, by the partition's key in hexadecimal. Ids count from 1 and are never
given again, so that whatever is left of a dropped partition is never taken for a later one's; 0 is
the id of a table without partitions, and is not listed.

The ids of dropped partitions stay there, as "dropped": [id, ...], until somebody has deleted their
files and forgets them; without any the field is left out, as it was before there was one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from foundation.errors import (
    CorruptRecord,
    RecordTooLarge,
    TableAltered,
    UnknownOutcome,
    UnknownTable,
)
from foundation.formats import Formats
from locks.catalog.definitions import CatalogTable, dropped
from locks.encoding.framing import Reader, RecordFormats, frame_document, read_framed
from locks.store.base import Check, CoordinationStore, Operation, Write, delete_all
from locks.store.paths import partitions_path, snapshots_path, table_path
from locks.store.retrying import retried


@dataclass(frozen=True, kw_only=True)
class Partitions:
    """The partitions of a table as they were read: ids by key, the next id, the node's version.

    `dropped`: the ids of partitions that were dropped and are not forgotten.
    """

    ids: Mapping[bytes, int] = field(default_factory=dict)
    next_id: int = 1
    dropped: tuple[int, ...] = ()
    version: int = 0


class PartitionCatalog:
    """Creates, lists and drops partitions; each change is one conditional write."""

    def __init__(self, store: CoordinationStore, deadline_s: float) -> None:
        self._store = store
        self._deadline_s = deadline_s

    def ids(self, table: CatalogTable) -> dict[bytes, int]:
        """Return the ids by key, as they are now; UnknownTable if the table was dropped."""
        return dict(self._read(table).ids)

    def create(self, table: CatalogTable, key: bytes) -> int:
        """Return the id of the partition of this key, which is created if there is none."""

        def attempt() -> int:
            found = self._read(table)
            if key not in found.ids:
                ids = {**found.ids, key: found.next_id}
                self._write(table, replace(found, ids=ids, next_id=found.next_id + 1))
                return found.next_id
            return found.ids[key]

        return retried(self._store, self._deadline_s, attempt)

    def drop(self, table: CatalogTable, key: bytes) -> int | None:
        """Drop the partition of this key and return its id; None if there is none."""
        in_doubt: int | None = None

        def attempt() -> int | None:
            nonlocal in_doubt
            try:
                found = self._read(table)
            except UnknownTable:
                if in_doubt is not None:
                    return in_doubt
                raise
            partition = found.ids.get(key)
            # Ids are not given again: another one of the same key came after our drop.
            if in_doubt is not None and partition != in_doubt:
                return in_doubt
            in_doubt = None
            if partition is not None:
                ids = {other: number for other, number in found.ids.items() if other != key}
                dropped_ids = (*found.dropped, partition)
                try:
                    self._write(table, replace(found, ids=ids, dropped=dropped_ids))
                except UnknownOutcome:
                    in_doubt = partition
                    raise
            return partition

        return retried(self._store, self._deadline_s, attempt)

    def drop_all(
        self, table: CatalogTable, partitions: Mapping[bytes, int], *, unaltered: bool = False
    ) -> list[bytes]:
        """Drop these partitions in one write; return the keys of those that were there.

        They go by key and id: one that came later in the place of another stays. `unaltered`:
        TableAltered, and nothing is dropped, if the table's definition is not as `table` says.
        """
        there: dict[bytes, int] | None = None

        def attempt() -> list[bytes]:
            nonlocal there
            found = self._read(table)
            still = {key: one for key, one in partitions.items() if found.ids.get(key) == one}
            there = still if there is None else there
            if still:
                conditions = [self._unaltered(table)] if unaltered else []
                ids = {key: number for key, number in found.ids.items() if key not in still}
                dropped_ids = (*found.dropped, *still.values())
                self._write(table, replace(found, ids=ids, dropped=dropped_ids), conditions)
            return sorted(there)

        return retried(self._store, self._deadline_s, attempt)

    def _unaltered(self, table: CatalogTable) -> Operation:
        path = table_path(table.table_id)
        node = self._store.read(path)
        if node is None:
            raise dropped(table)
        if node.version != table.version:
            raise TableAltered(f"table {table.name} was altered meanwhile; look at it again")
        return Check(path, node.version)

    def dropped(self, table: CatalogTable) -> list[int]:
        """Return the ids of the dropped partitions that nobody has forgotten, as they are now."""
        return list(self._read(table).dropped)

    def forget(self, table: CatalogTable, partition: int) -> None:
        """Delete the lists of snapshots of a dropped partition, and its id from the dropped."""
        parent = snapshots_path(table.table_id)

        def attempt() -> None:
            found = self._read(table)
            if partition not in found.dropped:
                return
            names = self._store.children(parent)
            lists = [name for name in names if name.startswith(f"{partition}-")]
            delete_all(self._store, [f"{parent}/{name}" for name in lists])
            still = tuple(one for one in found.dropped if one != partition)
            self._write(table, replace(found, dropped=still))

        retried(self._store, self._deadline_s, attempt)

    def _read(self, table: CatalogTable) -> Partitions:
        self._store.sync()
        node = self._store.read(partitions_path(table.table_id))
        if node is None:
            raise dropped(table)
        return decode_partitions(table.table_id, node.data, node.version)

    def _write(
        self,
        table: CatalogTable,
        partitions: Partitions,
        conditions: Sequence[Operation] = (),
    ) -> None:
        """Replace what was read as this version of the node."""
        path, data = partitions_path(table.table_id), encode_partitions(partitions)
        try:
            self._store.transact([Write(path, data, partitions.version), *conditions])
        except RecordTooLarge as exc:
            raise RecordTooLarge(
                f"table {table.name} would have {len(partitions.ids):,} partitions, which are too "
                f"many: {exc}; drop old partitions"
            ) from exc


def encode_partitions(partitions: Partitions) -> bytes:
    """Return the node's data."""
    ids = {key.hex(): number for key, number in partitions.ids.items()}
    fields = {"next": partitions.next_id, "partitions": ids}
    if partitions.dropped:
        fields["dropped"] = partitions.dropped
    return frame_document(FORMATS.current, fields)


def decode_partitions(table_id: int, data: bytes, version: int) -> Partitions:
    """Return the partitions; CorruptRecord if the bytes are none, or of no format that is read."""
    try:
        found = read_framed(FORMATS, data, f"the list of partitions of table {table_id}")
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CorruptRecord(f"the partitions of table {table_id} are damaged: {exc}") from exc
    return replace(found, version=version)


def _read_format_2(reader: Reader) -> Partitions:
    fields = reader.document()
    ids = {bytes.fromhex(key): int(number) for key, number in fields["partitions"].items()}
    return Partitions(
        ids=ids, next_id=int(fields["next"]), dropped=tuple(map(int, fields.get("dropped", ())))
    )


FORMATS: RecordFormats[Partitions] = Formats(
    name="partitions", current=2, readers={2: _read_format_2}, error=CorruptRecord
)
