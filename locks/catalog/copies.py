"""Which copies of a table there are in lakes, and how far each is: told by the jobs that keep them.

Nothing rests on it: a job knows from its lake where it is. It is for those who watch, and stays
when a job dies, for then the copy falls behind.

A record is a document (format 1): `location`, `format`, `had_all_ms` (when the copy had all that
was committed, by ZooKeeper's clock), and `batches`, the last one of each owner that is in it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from foundation.errors import CorruptRecord
from foundation.formats import Formats
from locks.encoding.framing import Reader, RecordFormats, frame_document, read_framed
from locks.store.base import CoordinationStore, Create, Delete, Write
from locks.store.paths import COPIES, copy_path
from locks.store.retrying import retried


@dataclass(frozen=True, kw_only=True)
class LakeCopy:
    """A copy as its job last said it is. `batches`: the last one of each owner that it has."""

    location: str
    format: str
    had_all_ms: int
    batches: Mapping[str, int] = field(default_factory=dict)

    def lag(self, committed: Mapping[str, int], now_ms: int) -> tuple[int, float]:
        """Return how many batches the copy does not have, and for how many seconds at most."""
        behind = sum(
            max(0, batch - self.batches.get(owner, -1)) for owner, batch in committed.items()
        )
        return behind, max(0.0, (now_ms - self.had_all_ms) / 1000) if behind else 0.0


def encode_copy(copy: LakeCopy) -> bytes:
    """Return the record of a copy."""
    return frame_document(
        FORMATS.current,
        {
            "location": copy.location,
            "format": copy.format,
            "had_all_ms": copy.had_all_ms,
            "batches": dict(copy.batches),
        },
    )


def decode_copy(data: bytes) -> LakeCopy:
    """Return what a record says; CorruptRecord if it is none."""
    return read_framed(FORMATS, data, "the record of a copy")


def _read(reader: Reader) -> LakeCopy:
    fields = reader.document()
    try:
        return LakeCopy(**fields)
    except TypeError as exc:
        raise CorruptRecord(f"the record of a copy is damaged: {exc}") from exc


FORMATS: RecordFormats[LakeCopy] = Formats(
    name="lake-copy", current=1, readers={1: _read}, error=CorruptRecord
)


class Copies:
    """Says where copies are, and how far. Safe for threads. Tables go by their ids."""

    def __init__(self, store: CoordinationStore, deadline_s: float) -> None:
        self._store = store
        self._deadline_s = deadline_s

    def tell(self, table_id: int, name: str, copy: LakeCopy) -> None:
        """Say how far a copy is, in place of what was said of it before."""
        path, data = copy_path(table_id, name), encode_copy(copy)

        def attempt() -> None:
            node = self._store.read(path)
            if node is None:
                self._store.transact([Create(path, data)])
            elif node.data != data:
                self._store.transact([Write(path, data, node.version)])

        retried(self._store, self._deadline_s, attempt)

    def forget(self, table_id: int, name: str | None = None) -> None:
        """Say no more of a copy that nobody keeps; without a name, of any of the table."""
        for one in self._names(table_id) if name is None else [name]:
            path = copy_path(table_id, one)

            def attempt(path: str = path) -> None:
                node = self._store.read(path)
                if node is not None:
                    self._store.transact([Delete(path, node.version)])

            retried(self._store, self._deadline_s, attempt)

    def all(self, table_id: int) -> dict[str, LakeCopy]:
        """Return the copies of a table by their names, as they are known now."""
        names = self._names(table_id)
        nodes = self._store.read_many([copy_path(table_id, name) for name in names])
        return {
            name: decode_copy(node.data)
            for name, node in zip(names, nodes, strict=True)
            if node is not None
        }

    def _names(self, table_id: int) -> list[str]:
        prefix = f"{table_id}."
        found = self._store.children(COPIES)
        return [one.removeprefix(prefix) for one in found if one.startswith(prefix)]
