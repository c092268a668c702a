"""How a tiering job gets on: each round as it is done, and all of them at the end."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from recovery.reader.cut import Cut


class RoundKind(Enum):
    """What a round has done."""

    COPY = "copied all rows"
    CHANGES = "applied what changed"
    NOTHING = "nothing is new"


@dataclass(frozen=True, kw_only=True)
class Lag:
    """How far a copy is behind its table: batches that are not in it, and since when."""

    batches: int
    seconds: float

    @classmethod
    def between(cls, copy: Cut, table: Cut, now_ms: int) -> "Lag":
        """Return how far a copy at one cut is behind a table at another."""
        if copy.has_same_work(table):
            return cls(batches=0, seconds=0.0)
        before: Mapping[str, int] = copy.batches
        ahead = [batch - before.get(owner, -1) for owner, batch in table.batches.items()]
        seconds = max(0.0, (now_ms - copy.time_ms) / 1000)
        return cls(batches=sum(one for one in ahead if one > 0), seconds=seconds)

    def at_most(self, seconds: float) -> "Lag":
        """Return it for a copy that had everything so many seconds ago.

        The last commit that it has may be much older: the table may have been quiet before.
        """
        return replace(self, seconds=min(self.seconds, seconds))

    def __str__(self) -> str:
        return f"{counted(self.batches, 'batch', 'batches')}, {self.seconds:.1f} s behind"


@dataclass(frozen=True)
class Underway:
    """How far the tasks of a step are, while they run: what those have done that have ended."""

    what: str
    tasks: int
    done: int
    rows: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.what}: {self.done} of {counted(self.tasks, 'task')} done after "
            f"{self.seconds:.0f} s, {counted(self.rows, 'row')}, {_size(self.bytes)}"
        )


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round of a job. `rows`, `bytes`: written. `lag`: what was committed while it ran.

    `files`: those of the copy. `compacted`: rows that were only moved from files to others.
    """

    kind: RoundKind
    number: int
    version: int
    cut: Cut
    rows: int = 0
    deleted: int = 0
    bytes: int = 0
    files: int = 0
    table_rows: int = 0
    compacted: int = 0
    cleaned: int = 0
    seconds: float = 0.0
    lag: Lag = Lag(batches=0, seconds=0.0)

    def __str__(self) -> str:
        if self.kind is RoundKind.NOTHING:
            return f"round {self.number}: {self.kind.value}"
        more = f", {self.compacted:,} compacted" if self.compacted else ""
        return (
            f"round {self.number}: {self.kind.value}: {counted(self.rows, 'row')}, "
            f"{self.deleted:,} deleted{more}, {_size(self.bytes)} in {self.seconds:.1f} s; the "
            f"copy has {counted(self.table_rows, 'row')} in {counted(self.files, 'file')} (version "
            f"{self.version}), {self.lag}"
        )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a job has done in all. `last`: its last round, if it came to one."""

    rounds: int = 0
    rows: int = 0
    deleted: int = 0
    bytes: int = 0
    failed: int = 0
    seconds: float = 0.0
    last: Round | None = None

    def plus(self, done: Round) -> "Summary":
        """Return it with one more round."""
        return replace(
            self,
            rounds=self.rounds + (done.kind is not RoundKind.NOTHING),
            rows=self.rows + done.rows,
            deleted=self.deleted + done.deleted,
            bytes=self.bytes + done.bytes,
            last=done,
        )

    def __str__(self) -> str:
        failed = f", {counted(self.failed, 'failed attempt')}" if self.failed else ""
        where = "" if self.last is None else f"; the copy is at version {self.last.version}"
        return (
            f"{counted(self.rounds, 'round')} in {self.seconds:.1f} s: "
            f"{counted(self.rows, 'row')}, {self.deleted:,} deleted, {_size(self.bytes)}{failed}"
            f"{where}"
        )


def counted(count: int, one: str, many: str | None = None) -> str:
    """Return how many there are, in words for one and for many."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
