"""Two streams fill one table; one is killed in the middle of a batch, a server is killed too.

At the end the table is compared with what the input files say. `make demo` runs this.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tallybook as tb
from examples.wide_table_data import CUSTOMERS, SCHEMA, STREAMS, TABLE, generate, normal, reference
from examples.wide_table_processes import DemoFailed, Job, follow

BUCKETS = 8


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much there is to do. `dies_at`: the batch, counted from 1, that orders does not survive.

    `clicks` has more files than `orders` and takes its time, so that it is busy all along.
    """

    files: Mapping[str, int]
    events_per_file: int
    every_ms: Mapping[str, int]
    dies_at: int


FULL = Size(
    files={"orders": 16, "clicks": 26},
    events_per_file=4_000,
    every_ms={"orders": 1_000, "clicks": 1_500},
    dies_at=6,
)
QUICK = Size(
    files={"orders": 6, "clicks": 8},
    events_per_file=1_000,
    every_ms={"orders": 300, "clicks": 600},
    dies_at=3,
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How the table compares with the reference."""

    customers: int
    differences: int
    double_counted: int
    lost: int

    @property
    def good(self) -> bool:
        """Whether every event was counted once."""
        return self.customers > 0 and not (self.differences or self.double_counted or self.lost)

    def __str__(self) -> str:
        return (
            f"customers compared: {self.customers:,}, differences: {self.differences:,}, "
            f"double-counted events: {self.double_counted:,}"
        )


class Demo:
    """The demo, step by step; everything it starts ends with the `ExitStack` it is given."""

    def __init__(self, size: Size, directory: Path, resources: ExitStack) -> None:
        self._size = size
        self._began = time.monotonic()
        self._inputs = {name: directory / name for name in STREAMS}

        self.title("A cluster and a table")
        self.say("ZooKeeper and 2 tablet servers are starting on this machine ...")
        self._local = resources.enter_context(tb.LocalCluster(directory / "cluster", servers=2))
        cluster = self._cluster = resources.enter_context(self._local.connect())
        self.say(f"they run, with all their files below {directory}")
        self._table = cluster.create_table(TABLE, SCHEMA, buckets=BUCKETS)
        self.say(
            f"the table `{TABLE}` is created, in {BUCKETS} buckets: its columns, how their values "
            f"merge,\n{_MARGIN}and which of two Spark jobs fills them\n"
        )
        print(_described())
        for name, stream in STREAMS.items():
            files = size.files[name]
            generate(stream, self._inputs[name], files=files, events_per_file=size.events_per_file)
        self._jobs = {name: resources.enter_context(self._job(name, directory)) for name in STREAMS}

    def _job(self, name: str, directory: Path) -> Job:
        arguments = {
            "--cluster": self._local.address,
            "--input": str(self._inputs[name]),
            "--checkpoint": str(directory / "checkpoints" / name),
            "--scratch": str(directory / "scratch" / name),
            "--every-ms": str(self._size.every_ms[name]),
        }
        words = [word for option in arguments.items() for word in option]
        return Job(name, words, directory, self._size.files[name])

    def run(self) -> Verdict:
        """Run all steps and return how it ended."""
        self.kill_a_job()
        self.look()
        self.restart_the_job()
        self.kill_a_server()
        self.title("To the end")
        self.follow(lambda: not any(job.running for job in self._jobs.values()))
        return self.compare()

    # --- The steps ------------------------------------------------------------------------------

    def kill_a_job(self) -> None:
        """Start both jobs; `orders` has orders to die."""
        self.title("Two Spark jobs, and the death of one")
        orders, clicks = self._jobs.values()
        failpoint = f"writer.put:{self._size.dies_at}"
        self.say(
            f"each job reads a file of {self._size.events_per_file:,} events per batch; starting "
            "Spark takes some seconds ..."
        )
        self.say(
            f"orders runs with TALLYBOOK_FAILPOINT={failpoint}: in its batch "
            f"{self._size.dies_at - 1}, when the rows\n{_MARGIN}are written and not yet committed, "
            "it kills itself with SIGKILL"
        )
        clicks.start()
        orders.start(TALLYBOOK_FAILPOINT=failpoint)
        self.follow(lambda: not orders.running, may_die=orders)
        if orders.exit_code != -signal.SIGKILL:
            raise DemoFailed(f"orders should have died, and ended with {orders.exit_code}")
        self.say(f"orders   was killed in batch {orders.committed + 1}")

    def look(self) -> None:
        """Show what the dead job left, to both kinds of look-ups."""
        self.title("What it left")
        columns = STREAMS["orders"].columns
        everybody = {"customer_id": list(range(1, CUSTOMERS + 1))}
        latest, committed = (
            self._table.lookup(everybody, columns, isolation=isolation).to_pylist()
            for isolation in ("latest", "committed")
        )
        changed = [(now, then) for now, then in zip(latest, committed, strict=True) if now != then]
        if not changed:
            raise DemoFailed("the dead job's uncommitted rows are not to be seen")
        # One of which all columns have changed tells the most.
        now, then = max(changed, key=lambda pair: sum(pair[0][c] != pair[1][c] for c in columns))
        total, stable = (sum(row["orders"] or 0 for row in rows) for rows in (latest, committed))
        print(f"  {'':22}  {'orders of all':>13}  {'customer ' + str(now['customer_id'])}")
        for isolation, count, row in (("latest", total, now), ("committed", stable, then)):
            values = ", ".join(f"{column} {_shown(row[column])}" for column in columns)
            print(f"  {isolation + ' look-ups see':22}  {count:13,}  {values}")
        self.say(
            f"{total - stable:,} orders of {len(changed):,} customers are there, but not committed"
        )
        if total - stable != self._size.events_per_file:
            raise DemoFailed(f"a batch has {self._size.events_per_file:,} orders")

    def restart_the_job(self) -> None:
        """Start `orders` again, on its checkpoint: it recovers by itself."""
        self.title("The same job again, on its checkpoint")
        orders = self._jobs["orders"]
        committed = orders.committed
        orders.start()
        self.say("orders   starts; clicks has not noticed anything ...")
        self.follow(lambda: orders.committed >= committed + 3 or not orders.running)

    def kill_a_server(self) -> None:
        """Kill a tablet server; the other takes its buckets over until it is back."""
        self.title("A tablet server dies, too")
        leads = self._leads()
        victim = max(self._local.servers, key=lambda server: leads.get(server.pid, 0))
        other = next(server for server in self._local.servers if server is not victim)
        count = leads.get(victim.pid, 0)
        victim.kill()
        self.say(
            f"server {victim.number}, leader of {count} of the {BUCKETS} buckets, was killed; the "
            f"jobs wait\n{_MARGIN}until ZooKeeper has noticed, which takes 4 s ..."
        )
        before = {name: job.committed for name, job in self._jobs.items()}
        self.follow(
            lambda: all(
                job.committed > before[name] or not job.running for name, job in self._jobs.items()
            )
        )
        self.follow(lambda: self._leads().get(other.pid, 0) == BUCKETS)
        self.say(f"server {other.number} leads all {BUCKETS} buckets")
        victim.start()
        self.say(f"server {victim.number} is started again ...")
        self.follow(lambda: self._leads().get(victim.pid, 0) == count)
        self.say(f"server {victim.number} is back, with its {count} buckets")

    def compare(self) -> Verdict:
        """Print the table beside the reference."""
        self.title("The table beside the reference")
        expected = reference(self._inputs)
        keys = {"customer_id": list(expected)}
        rows = self._table.lookup(keys, isolation="committed").to_pylist()
        found = {row.pop("customer_id"): normal(row) for row in rows}
        print("The reference is computed from the input files with pyarrow.\n")
        customers = list(expected)
        print(_beside(found, expected, customers[:: len(customers) // 4][:4]), end="")
        for name in STREAMS:
            events = [sum(row[name] or 0 for row in side.values()) for side in (expected, found)]
            print(f"{name}: {events[0]:,} events in the files, {events[1]:,} in the table")
        surplus = [
            (found[customer][name] or 0) - (row[name] or 0)
            for customer, row in expected.items()
            for name in STREAMS
        ]
        return Verdict(
            customers=len(expected),
            differences=sum(found[customer] != row for customer, row in expected.items()),
            double_counted=sum(max(0, events) for events in surplus),
            lost=sum(max(0, -events) for events in surplus),
        )

    # --- Small things ---------------------------------------------------------------------------

    def follow(self, until: Any, may_die: Job | None = None) -> None:
        """Show what the jobs do until something is true."""
        follow(list(self._jobs.values()), self.show, until, may_die=may_die)

    def show(self, job: Job, message: dict[str, Any]) -> None:
        """Print one line about a batch, and one about what was undone before it."""
        if message["undone"]:
            self.say(
                f"{job.name:8} undid what was not committed, of {message['undone']:,} customers, "
                f"and did batch {message['batch']} again"
            )
        done = job.committed + 1
        bar = "#" * done + "-" * (job.files - done)
        self.say(
            f"{job.name:8} batch {message['batch']:2}  {message['events']:,} events, "
            f"{message['customers']:,} customers, {message['milliseconds']:5,.0f} ms  [{bar}]"
        )

    def title(self, text: str) -> None:
        """Begin a step."""
        print(f"\n--- {text} ---", flush=True)

    def say(self, text: str) -> None:
        """Print a line with the time since the start."""
        print(f"{time.monotonic() - self._began:5.1f} s  {text}", flush=True)

    def _leads(self) -> dict[int, int]:
        """Return how many buckets each server leads, by process id."""
        try:
            servers = self._cluster.status()
        except tb.TallybookError:
            return {}  # A bucket moved while its server was asked; the next time it has moved.
        return {
            server["pid"]: len(server["buckets"]) for server in servers if "error" not in server
        }


_MARGIN = " " * len("  0.0 s  ")


def _described() -> str:
    """Return the columns of the table, with who fills them."""
    lines = [("customer_id", "the key", "")]
    for name, stream in STREAMS.items():
        for column in stream.columns:
            function = SCHEMA.column(column).function
            assert function is not None
            lines.append((column, function.name, name))
    return "\n".join(
        f"{_MARGIN}{column:12}  {how:24}  {who}".rstrip() for column, how, who in lines
    )


def _beside(
    found: Mapping[int, dict[str, Any]],
    expected: Mapping[int, dict[str, Any]],
    customers: Sequence[int],
) -> str:
    """Return two lines per customer: what the table says, and what the reference says."""
    columns = [column for stream in STREAMS.values() for column in stream.columns]
    lines = [["customer", "", *columns]]
    for customer in customers:
        for side, rows in (("table", found), ("reference", expected)):
            label = f"{customer:,}" if side == "table" else ""
            lines.append([label, side, *(_shown(rows[customer][column]) for column in columns)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "".join(
        "  "
        + "  ".join(f"{text:>{width}}" for text, width in zip(line, widths, strict=True))
        + ("\n\n" if line[1] == "reference" else "\n")
        for line in lines
    )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} pages"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main() -> int:
    """Run the demo; 1 if the table is not what it should be."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="fewer and smaller files")
    size = QUICK if options.parse_args().quick else FULL
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        print("Spark and ZooKeeper need Java 17, and there is no `java` here", file=sys.stderr)
        return 1
    began = time.monotonic()
    print(
        "Two Spark jobs fill one table, each its own columns. One of them is killed in the middle\n"
        "of a batch, then a server is. In the end every event must have been counted exactly once."
    )
    try:
        with ExitStack() as resources:
            directory = tempfile.TemporaryDirectory(
                prefix="tallybook-demo-", ignore_cleanup_errors=True
            )
            verdict = Demo(size, Path(resources.enter_context(directory)), resources).run()
    except KeyboardInterrupt:
        print("\ninterrupted; all processes were ended", file=sys.stderr)
        return 128 + signal.SIGINT
    except DemoFailed as exc:
        print(f"\nthe demo failed: {exc}", file=sys.stderr)
        return 1
    print(
        f"\nAll processes were ended after {time.monotonic() - began:.0f} s, their files removed."
    )
    print(verdict)
    return 0 if verdict.good else 1


if __name__ == "__main__":
    sys.exit(main())
