"""Partitions that are older than their table keeps them."""

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from foundation.errors import InvalidInput
from locks.catalog.definitions import CatalogTable
from locks.coordinator import Coordinator
from locks.store.memory import MemoryCoordination
from merge_engine.merging.dated_partitions import moment_of, older_partitions
from merge_engine.merging.routing import partition_key, partition_rows
from merge_engine.schema.builder import SchemaBuilder
from server.protocol.definitions import define, retaining
from server.tablet.janitor import Janitor
from server.tablet.retention import GRACE_S
from tests.conftest import SUMS
from tests.support.coordinators import just_before_the_next_transaction
from tests.support.day_tables import DATED, DAYS
from tests.support.snapshot_world import InMemorySession, MemoryStorage

TIMED = (
    SchemaBuilder()
    .column("hour", "TIMESTAMP")
    .column("k", "BIGINT")
    .agg_column("a", "BIGINT", "sum")
    .primary_key("hour", "k")
    .partitioned_by("hour")
    .build()
)
TODAY = date(2026, 3, 31)
DAY_MS = 24 * 3_600_000
MIDNIGHT_MS = (TODAY - date(1970, 1, 1)).days * DAY_MS


class World:
    """A coordinator in memory, and the janitor of the one server of the cluster."""

    def __init__(self) -> None:
        self.coordinator = Coordinator(MemoryCoordination().connect())
        server = self.coordinator.servers.register("127.0.0.1:1")
        self.now_ms = MIDNIGHT_MS
        session = InMemorySession(self.coordinator, server.name, lambda: self.now_ms)
        self.janitor = Janitor(MemoryStorage(), session)

    def create(self, name: str = "t", retention: str | None = "7 days") -> CatalogTable:
        definition = define(DATED, 1, column_locks=True, options={})
        return self.coordinator.tables.create(name, retaining(definition, retention))

    def add(self, table: CatalogTable, *ages: int) -> None:
        for age in ages:
            day = TODAY - timedelta(days=age)
            key = partition_key(DATED, {"day": day, "region": "eu"})
            self.coordinator.partitions.create(table, key)

    def ages(self, table: CatalogTable) -> list[int]:
        days = partition_rows(DATED, self.coordinator.partitions.ids(table))["day"].to_pylist()
        return sorted((TODAY - day).days for day in days)

    def look(self, after_s: float = 0) -> None:
        self.now_ms += int(after_s * 1000)
        self.janitor.look()


@pytest.fixture
def world() -> World:
    return World()


def test_a_partition_goes_when_all_of_its_day_is_too_old_for_a_while(world: World) -> None:
    table, other = world.create(), world.create("other", None)
    for one in (table, other):
        world.add(one, 0, 6, 7, 8, 300)
    world.look()
    world.look(GRACE_S - 1)
    assert world.ages(table) == [0, 6, 7, 8, 300]
    world.look(1)  # The day seven days ago ended less than seven days ago.
    assert world.ages(table) == [0, 6, 7]
    world.look(DAY_MS / 1000)
    world.look(GRACE_S)
    assert world.ages(table) == [0, 6]
    assert world.ages(other) == [0, 6, 7, 8, 300]


def test_one_that_rows_make_again_has_its_while_again(world: World) -> None:
    table = world.create()
    world.add(table, 8)
    world.look()
    world.look(GRACE_S)
    assert world.ages(table) == []
    world.add(table, 8)
    world.look()
    assert world.ages(table) == [8]
    world.look(GRACE_S)
    assert world.ages(table) == []
    assert world.coordinator.partitions.dropped(table) == []  # Their files are gone, too.


@pytest.mark.parametrize("change", ["longer", "made again", "table dropped"])
def test_what_changes_at_the_last_moment_is_respected(
    world: World, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = world.create()
    world.add(table, 8)
    world.look()
    catalog = world.coordinator.tables

    def intrude() -> None:
        if change == "longer":
            catalog.alter(table, retaining(table.definition, "30 days"))
        elif change == "table dropped":
            world.coordinator.drop_table(table)
        else:
            [key] = world.coordinator.partitions.ids(table)
            world.coordinator.partitions.drop(table, key)
            world.coordinator.partitions.create(table, key)

    just_before_the_next_transaction(world.coordinator, intrude, monkeypatch)
    world.look(GRACE_S)
    if change == "table dropped":
        assert catalog.all() == []
    else:
        assert world.ages(table) == [8]


def test_a_retention_that_is_taken_away_drops_nothing(world: World) -> None:
    table = world.create()
    world.add(table, 8)
    world.look()
    world.coordinator.tables.alter(table, retaining(table.definition, None))
    world.look(GRACE_S)
    assert world.ages(table) == [8]


@pytest.mark.parametrize("schema", [DAYS, SUMS])
def test_a_table_without_a_date_has_no_retention(schema: Any) -> None:
    with pytest.raises(InvalidInput, match="exactly one partition column is a DATE or a TIMESTAMP"):
        define(schema, 1, column_locks=True, options={"retention": "3 days"})


def test_a_retention_is_checked_and_written_one_way() -> None:
    def made(text: str) -> str:
        return define(TIMED, 1, column_locks=True, options={"retention": text}).options["retention"]

    assert made("48h") == "2 days"
    with pytest.raises(InvalidInput, match="no duration"):
        made("for ever")


def test_a_partition_of_a_time_is_as_old_as_its_beginning() -> None:
    noon = datetime(2026, 3, 31, 12, tzinfo=UTC)
    keys = [partition_key(TIMED, {"hour": noon + timedelta(hours=one)}) for one in (-1, 0, 1)]
    moments: list[tuple[Any, int]] = [
        (noon, 1),
        ("2026-03-31T12:00:00.000001", 2),
        ("2026-03-31T14:00:00+02:00", 1),
        (noon.date(), 0),
        ("1 day", 3),
    ]
    now_ms = int((noon + timedelta(days=1, hours=2)).timestamp() * 1000)
    for older_than, expected in moments:
        before = moment_of(older_than, lambda: now_ms)
        assert older_partitions(TIMED, keys, before) == keys[:expected]
