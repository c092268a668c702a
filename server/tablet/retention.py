"""Partitions that are older than their table keeps them: dropped, by one server for all.

By the cluster's clock. What a partition holds is not looked at, nor who writes it: rows that come
for it later make it again. So that such a batch can come to its end, a partition is left for a
while after it was first seen to be too old.
"""

import logging
from collections.abc import Mapping

from foundation.durations import microseconds
from foundation.errors import TableAltered
from locks.catalog.definitions import CatalogTable
from locks.coordinator import Coordinator
from merge_engine.encoding.soundness import readable_rows
from merge_engine.merging.dated_partitions import older_partitions
from merge_engine.merging.routing import partition_rows
from server.protocol.definitions import ClusterTable
from server.tablet.requests import Session

logger = logging.getLogger(__name__)

GRACE_S = 600.0


class Retention:
    """Drops what tables do not keep. Knows since when it has seen which partition too old."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._seen_ms: dict[int, dict[int, int]] = {}

    def look(self, coordinator: Coordinator, table: CatalogTable) -> None:
        """Drop the partitions of this table that have been too old for long enough."""
        cluster_table = ClusterTable(table)
        kept_for = cluster_table.retention
        if kept_for is None:
            self._seen_ms.pop(table.table_id, None)
            return
        now_ms = self._session.now_ms()
        ids = coordinator.partitions.ids(table)
        before = now_ms * 1000 - microseconds(kept_for)
        old = {key: ids[key] for key in older_partitions(cluster_table.schema, ids, before)}
        due = self._due(table.table_id, old, now_ms)
        if not due:
            return
        try:
            dropped = coordinator.partitions.drop_all(table, due, unaltered=True)
        except TableAltered:  # Perhaps its retention: the next look has it as it is.
            return
        if dropped:
            shown = readable_rows(partition_rows(cluster_table.schema, dropped))
            logger.info("partitions of %s are past their retention: %s", table.name, shown)

    def forget_all_but(self, tables: frozenset[int]) -> None:
        """Let go of what is known of tables that are no more."""
        for table_id in self._seen_ms.keys() - tables:
            del self._seen_ms[table_id]

    def _due(self, table_id: int, old: Mapping[bytes, int], now_ms: int) -> dict[bytes, int]:
        before = self._seen_ms.get(table_id, {})
        seen = {number: before.get(number, now_ms) for number in old.values()}
        self._seen_ms[table_id] = seen
        return {
            key: number for key, number in old.items() if now_ms - seen[number] >= GRACE_S * 1000
        }
