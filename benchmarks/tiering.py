"""Copies in a lake: full copies against Parquet, rounds against full copies, union reads."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

import tallybook as tb
from benchmarks.figure import Figure, Setting
from benchmarks.measure import Pairs, timed
from benchmarks.readers import drain, filled
from benchmarks.spark import local_spark
from benchmarks.workload import Workload
from server.client.cluster import Recipe
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster
from sink.rolling_lease import RollingLease
from sink.tiering.copying import TableCopy
from sink.tiering.options import TieringOptions

_COLUMNS = ("total", "highest", "events", "status")
_ROUNDS = 20
_WARM = 3


@dataclass
class _Bench:
    """A filled table, its lease, and a Spark session; copies are made below a directory."""

    setting: Setting
    directory: Path
    local: LocalCluster
    table: RemoteTable
    spark: Any
    lease: RollingLease
    small: Workload
    copies: int = 0

    def open(self, **options: Any) -> TableCopy:
        """Return a copy that is still to be made, at a path of its own."""
        self.copies += 1
        to = str(self.directory / f"lake{self.copies}")
        wanted = TieringOptions(table=self.table.name, to=to, **options)
        copy = TableCopy(self.spark, self.table, Recipe.of(self.local.address), wanted)
        copy.load()
        return copy

    def work(self, copy: TableCopy) -> float:
        """Return the seconds that a round takes, with what looks after the files."""

        def step() -> None:
            done = copy.round(self.lease)
            copy.compact(done.rows)
            copy.clean()

        seconds, _ = timed(step)
        assert copy.state is not None
        assert copy.state.rows == self.setting.keys
        return seconds

    def full(self, **options: Any) -> float:
        """Return the seconds that a full copy takes."""
        return self.work(self.open(**options))

    def change(self, *columns: str) -> None:
        """Change one key in a hundred: by one owner, or each column by its own."""
        batch = self.small.batch()
        shares: list[tuple[str, ...]] = [(name,) for name in columns] or [_COLUMNS]
        for names in shares:
            owner = "bench" if names == _COLUMNS else names[0]
            with self.table.writer(owner_id=owner, columns=names, handover=True) as writer:
                writer.write(writer.batch + 1, tb.Rows(data=batch, columns=names))


def tiering(setting: Setting) -> Iterator[Figure]:
    """Full copies, rounds after one key in a hundred has changed, and union reads."""
    directory = setting.directory / "tiering"
    work = Workload(setting.keys, batch_rows=setting.batch_rows)
    with ExitStack() as stack:
        local, table = stack.enter_context(filled(directory, work))
        spark = stack.enter_context(local_spark(directory))
        table.snapshot()
        lease = RollingLease(table, "bench", 3_600_000)
        stack.callback(lease.drop)
        small = Workload(setting.keys, batch_rows=setting.keys // 100, seed=1)
        bench = _Bench(setting, directory, local, table, spark, lease, small)
        yield _full_copy(bench)
        yield from _rounds(bench)
        yield _union(bench)


def _full_copy(bench: _Bench) -> Figure:
    rows = bench.directory / "rows.parquet"
    pq.write_table(bench.table.scan().to_arrow(), rows)
    frame = bench.spark.read.parquet(str(rows))

    def theirs() -> None:
        frame.write.mode("overwrite").parquet(str(bench.directory / "written"))

    count, ours, others = bench.setting.keys, [], []
    for run in range(_WARM + bench.setting.runs):
        mine, other = bench.full(), timed(theirs)[0]
        if run >= _WARM:  # The JVM takes some to get to speed.
            ours.append(mine / count)
            others.append(other / count)
    return Pairs(ours, others).speed(
        "lake_full_copy_vs_spark_parquet",
        what=f"a full copy of {count:,} rows and 5 columns as a Delta table, from KV snapshots, "
        "against Spark writing the same rows, from one Parquet file, as Parquet",
        unit="rows",
        goal=">=0.5",
    )


def _rounds(bench: _Bench) -> Iterator[Figure]:
    """Yield rounds of one copy: the first ones, and those after twenty; then of other kinds."""
    copy = bench.open()
    bench.work(copy)
    runs, wholes, rounds = bench.setting.runs, [], []
    for number in range(_ROUNDS + runs):
        bench.change()
        rounds.append(bench.work(copy))
        if number < runs or number >= _ROUNDS:
            wholes.append(bench.full())
    what = (
        f"a round after {bench.setting.keys // 100:,} of {bench.setting.keys:,} keys have changed, "
        "with compaction and clean-up, against a full copy"
    )
    yield Pairs(rounds[:runs], wholes[:runs]).duration(
        "lake_round_vs_full_copy", what=f"{what}; deletion vectors", goal="<0.25"
    )
    yield Pairs(rounds[_ROUNDS:], wholes[runs:]).duration(
        "lake_round_after_20_vs_full_copy", what=f"the same after {_ROUNDS} rounds", goal="<0.25"
    )
    mean = sum(rounds) / len(rounds)
    yield Pairs([mean], [sorted(wholes)[len(wholes) // 2]]).duration(
        "lake_round_mean_vs_full_copy",
        what=f"the mean of all {len(rounds)} rounds, those that compact files among them",
        goal="<0.25",
    )
    yield _other_rounds(
        bench, "lake_round_looked_up_vs_full_copy", f"{what}; two owners", "total", "highest"
    )
    yield _other_rounds(
        bench,
        "lake_round_rewrite_vs_full_copy",
        f"{what}; layout rewrite, random keys",
        layout="rewrite",
    )


def _other_rounds(bench: _Bench, name: str, what: str, *columns: str, **options: Any) -> Figure:
    copy, rounds, wholes = bench.open(**options), [], []
    bench.work(copy)
    for _ in range(bench.setting.runs):
        bench.change(*columns)
        rounds.append(bench.work(copy))
        wholes.append(bench.full(**options))
    return Pairs(rounds, wholes).duration(name, what=what)


def _union(bench: _Bench) -> Figure:
    copy = bench.open()
    bench.work(copy)
    bench.change()
    tb.spark.register(bench.spark)
    place = {"zookeeper": bench.local.address, "table": bench.table.name}

    def frame(**options: str) -> Any:
        return bench.spark.read.format("tallybook").options(**place, **options).load()

    count, ours, others = bench.setting.keys, [], []
    for run in range(_WARM + bench.setting.runs):
        mine = timed(partial(drain, frame(lake=copy.lake.place.location)))[0]
        other = timed(partial(drain, frame()))[0]
        if run >= _WARM:
            ours.append(mine / count)
            others.append(other / count)
    return Pairs(ours, others).speed(
        "lake_union_read_vs_live",
        what=f"`spark.read` of {count:,} rows with `lake`, one key in a hundred changed since, "
        "against the same without it, from the servers",
        unit="rows",
        goal=">=0.5",
    )
