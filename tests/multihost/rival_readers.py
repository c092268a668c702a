"""Who reads the rivals' table meanwhile: look-ups and scans, cut to cut, bucket by bucket."""

from typing import Any

from foundation.ids import BucketId
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from tests.multihost.clients import apply_changes
from tests.multihost.rival_batches import ALL_KEYS, COLUMNS, State, scanned_state, state_of
from tests.multihost.rival_writer import Era
from tests.multihost.sharing import PAUSE_S


class Reader:
    """Reads what is committed, by look-up and by scan in turn."""

    kind = "rivals, committed"

    def __init__(self, era: Era) -> None:
        self._era = era
        self._before: State = {}

    def run(self, cluster: Cluster) -> None:
        """Read until the era is over."""
        table, number = cluster.table_by_id(self._era.table_id), 0
        while not self._era.over.wait(PAUSE_S):
            least = self._era.ledger.acknowledged

            def read(least: frozenset[int] = least, number: int = number) -> None:
                state = self._read(table, number)
                wrong = self._era.ledger.wrong(state, least, self._before)
                if wrong:
                    self._era.shared.say_wrong(f"{self.kind}: {wrong}")
                self._before = state

            self._era.shared.in_time(self.kind, number, read)
            number += 1

    def _read(self, table: RemoteTable, number: int, /) -> State:
        if number % 2:
            found = table.lookup(ALL_KEYS, isolation="committed")
            return state_of(found.to_pylist())
        return scanned_state(table.scan().to_arrow().to_pylist())


class Cuts(Reader):
    """Follows the changes from cut to cut."""

    kind = "rivals, changes"

    def __init__(self, era: Era) -> None:
        super().__init__(era)
        self._rows: dict[int, dict[str, Any]] = {}
        self._reached: Any = None

    def _read(self, table: RemoteTable, _number: int, /) -> State:
        found = table.changes(self._reached, table.cut())
        rows = {key: dict(row) for key, row in self._rows.items()}
        for wrong in apply_changes(rows, found.to_arrow().to_pylist(), COLUMNS):
            self._era.shared.say_wrong(f"{self.kind}: {wrong}")
        self._rows, self._reached = rows, found.until
        return state_of(rows.values())


class Follower(Reader):
    """Follows the committed changelog of each bucket, which is at its own place in each."""

    kind = "rivals, changelogs"

    def __init__(self, era: Era) -> None:
        super().__init__(era)
        self._rows: dict[int, dict[str, Any]] = {}
        self._reached: dict[BucketId, int] = {}

    def run(self, cluster: Cluster) -> None:
        """Follow until the era is over; what is read is judged when all is at rest."""
        table, number = cluster.table_by_id(self._era.table_id), 0
        while not self._era.over.wait(PAUSE_S):
            self._era.shared.in_time(self.kind, number, lambda: self._follow(table))
            number += 1

    def to_the_end(self, table: RemoteTable) -> State:
        """Read what is left, and return where all of it leads."""
        self._follow(table)
        return state_of(self._rows.values())

    def _follow(self, table: RemoteTable) -> None:
        for bucket in table.bucket_ids():
            changelog = table.changelog(bucket, self._reached.get(bucket, 0))
            records = [row for part in changelog for row in part.to_pylist()]
            for wrong in apply_changes(self._rows, records, COLUMNS):
                self._era.shared.say_wrong(f"{self.kind}: {wrong}")
            self._reached[bucket] = changelog.next_offset
