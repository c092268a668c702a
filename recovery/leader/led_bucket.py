"""A bucket and its leader's memory: the calls of the writer protocol, each from check to apply."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from foundation.errors import (
    InvalidValue,
    NotFenced,
    NotLeader,
    OffsetOutOfRange,
    OldEpoch,
    SealedBatch,
    TornPut,
    WrongColumns,
)
from foundation.failpoints import hit
from foundation.ids import BucketId, Token
from foundation.parallel import Mapper
from locks.column_locks.records import LockRecord
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.overlay import Overlay
from merge_engine.bucket.put_to_all import commit_held, held, plan_held
from merge_engine.bucket.results import BucketResult, UndoResult
from merge_engine.bucket.undo import UndoRange, to_the_end
from merge_engine.merging.fold import Update
from recovery.leader.fenced_writers import FencedWriters, Writer


@dataclass(frozen=True, kw_only=True)
class LedUpdate:
    """A part of a put: what is for one bucket. `term`: of the leader that fenced the writer."""

    bucket: "LedBucket"
    update: Update
    term: int | None = None


@dataclass(frozen=True, kw_only=True)
class Put:
    """A put of several parts: whose it is, under which token, and who sends it.

    `put_id` tells it from other attempts at the same token, which may have other rows. One that is
    `resumable` has the same parts whoever sends it: a promise. So it is gone on with, part by part;
    any other that was begun and cannot be finished by who began it is torn.
    """

    writer: Writer
    owner: str
    token: Token
    put_id: str
    resumable: bool = False


@dataclass
class _Begun:
    """A put of which some parts were written here, and not the last one."""

    put: Put
    parts: int = 0
    rows: int = 0


class LedBucket:
    """A bucket that this process leads, as writers see it. Safe for threads.

    Without column locks (`locked=False`) anybody writes, and nobody is fenced.
    """

    def __init__(self, bucket: Bucket, key: BucketId, *, locked: bool = True) -> None:
        self.bucket = bucket
        self.key = key
        self.locked = locked
        self._writers = FencedWriters()
        # By owner. It goes with the leader, as the fenced writers do: then all start over.
        self._begun: dict[str, _Begun] = {}

    @property
    def term(self) -> int:
        """The offset of this leader's segment; every call of a fenced writer carries it."""
        return self.bucket.term

    def fence(self, writer: Writer, columns: Iterable[int], record: LockRecord | None) -> int:
        """Refuse older epochs from here on, if this one is the current one; return the term.

        `record` is the owner's, read from ZooKeeper with sync since the call came in.
        """
        wanted = frozenset(columns)
        if record is None or not record.held or record.epoch != writer.epoch:
            held = record is not None and record.held
            now = f"has epoch {record.epoch}" if record is not None and held else "is not held"
            raise OldEpoch(
                f"the lock of `{writer.owner}` {now}; epoch {writer.epoch} is over: stop for good"
            )
        if not wanted <= record.pinned:
            raise WrongColumns(
                f"the lock of `{writer.owner}` (epoch {writer.epoch}) does not have the columns "
                f"with ids {sorted(wanted - record.pinned)}"
            )
        with self.bucket.exclusive():
            self._writers.fence(writer, wanted)
            begun = self._begun.get(writer.owner)
            if begun is not None and begun.put.writer.epoch < writer.epoch:
                del self._begun[writer.owner]  # It is undone, or gone on with as a promise.
            return self.term

    def undo(
        self,
        writer: Writer,
        term: int,
        debtor: str,
        columns: Iterable[int],
        wanted: UndoRange,
        *,
        go_on: Callable[[], bool] = to_the_end,
    ) -> UndoResult:
        """Pay an undo debt: bring the debtor's changes of the columns at these offsets back.

        When `go_on` says no, only some of them, one step at least: see `Bucket.undo`.
        """
        ids = frozenset(columns)

        def check() -> None:
            self._check(writer, term, ids)
            self._writers.check_payment(writer)

        return self._undo(debtor, ids, wanted, check, go_on, locked=True)

    def undo_unlocked(
        self,
        debtor: str,
        columns: Iterable[int],
        wanted: UndoRange,
        *,
        go_on: Callable[[], bool] = to_the_end,
    ) -> UndoResult:
        """The same for a table without column locks, where nobody is refused."""
        if self.locked:
            raise needs_writer()
        return self._undo(debtor, frozenset(columns), wanted, lambda: None, go_on, locked=False)

    def _undo(
        self,
        debtor: str,
        columns: frozenset[int],
        wanted: UndoRange,
        check: Callable[[], None],
        go_on: Callable[[], bool],
        *,
        locked: bool,
    ) -> UndoResult:
        try:
            return self.bucket.undo(
                debtor, columns, wanted, locked=locked, check=check, go_on=go_on
            )
        except OffsetOutOfRange:
            self.bucket.confirm()  # One that was deposed has less of the log than there is.
            raise

    def end_recovery(self, writer: Writer, term: int) -> int:
        """Return the log end, and take no payments after it."""
        with self.bucket.exclusive():
            self._check(writer, term, ())
            self._writers.recovered(writer)
            return self.bucket.settled_end()

    def seal(self, writer: Writer, term: int, batch: int) -> int:
        """Close a batch to late tasks; return the log end."""
        with self.bucket.exclusive():
            self._check(writer, term, ())
            self.seal_held(writer, batch)
            return self.bucket.settled_end()

    def seal_held(self, writer: Writer, batch: int) -> None:
        """Close a batch of a writer that was checked, while the bucket is held."""
        self._writers.seal(writer, batch)
        begun = self._begun.get(writer.owner)
        if begun is not None and begun.put.token.epoch == writer.epoch:
            raise _torn(begun.put.token, writer.owner, "its batch is sealed")

    def parts_done(self, put: Put, term: int) -> int:
        """Return how many parts of a put are written here; 0 also of one that is complete.

        Errors as for `put_part`.
        """
        with self.bucket.exclusive():
            self._check(put.writer, term, ())
            applied = self.bucket.last_token(put.owner)
            if applied is not None and applied.token == put.token:
                return 0
            return self._begin(put).parts

    def put_part(
        self, put: Put, term: int, update: Update, *, part: int, more: bool, parts: int = 1
    ) -> BucketResult | None:
        """Write a part of a large put, if it is its turn; the result once the put is complete.

        Parts come in order, from 0 on; one that was written before is passed over. With `parts`,
        this and the next ones are written as one. A token that was applied gives its result right
        away, whatever the rows. Overtaken: another attempt at this token has begun here, and its
        rows stand. TornPut: this or another attempt was begun, and cannot be finished.
        """
        with self.bucket.exclusive():
            result = self._put_parts(put, term, update, range(part, part + parts), more)
        hit("put.part_written")  # Others may write here now.
        return result

    def _put_parts(
        self, put: Put, term: int, update: Update, parts: range, more: bool
    ) -> BucketResult | None:
        self._check(put.writer, term, [column.id for column in update.columns])
        applied = self.bucket.last_token(put.owner)
        if applied is not None and applied.token == put.token:
            return BucketResult(
                base_offset=applied.base_offset, end_offset=applied.end_offset, repeated=True
            )
        begun = self._begin(put)
        if parts.stop <= begun.parts:
            return None
        if parts.start != begun.parts:
            raise _torn(put.token, put.owner, f"part {parts.start} is not part {begun.parts}")
        self._writers.check_new(put.writer, put.token)
        result = self.bucket.put_part(
            update, owner=put.owner, token=put.token, part=parts.stop - 1, more=more
        )
        begun.parts = parts.stop
        begun.rows += result.changed
        self._begun[put.owner] = begun
        if more:
            return None
        del self._begun[put.owner]
        whole = self.bucket.last_token(put.owner)
        assert whole is not None
        return BucketResult(
            base_offset=whole.base_offset, end_offset=whole.end_offset, rows=begun.rows
        )

    def try_part(self, writer: Writer, term: int, update: Update, overlay: Overlay) -> None:
        """See whether a part of a put can be merged, on top of what the overlay has."""
        with self.bucket.exclusive():
            self._check(writer, term, [column.id for column in update.columns])
        self.bucket.try_part(update, overlay)

    def _begin(self, put: Put) -> _Begun:
        """Return how far a put has got here; call it while the bucket is held."""
        begun = self._begun.get(put.owner)
        if begun is not None and begun.put.token == put.token:
            if put.resumable or begun.put.put_id == put.put_id:
                return begun
            raise Overtaken(begun.put.put_id)
        written = self.bucket.parts_applied(put.owner)
        if written is None or written.token != put.token:
            return _Begun(put)
        if not put.resumable:
            raise _torn(put.token, put.owner, "it was begun under another leader")
        return _Begun(put, written.parts)

    def check_put(
        self,
        writer: Writer | None,
        term: int | None,
        columns: Iterable[int],
        owner: str,
        token: Token | None,
    ) -> None:
        """Raise unless the put may go on; call it while the bucket is held.

        The order matters: a token that was applied is answered also when its batch is sealed.
        """
        if not self.locked:
            if term is not None:
                self._check_term(term)
            self._check_not_late(owner, token)
            return
        if writer is None or term is None or token is None:
            raise needs_writer()
        self._check(writer, term, columns)
        applied = self.bucket.last_token(owner)
        if applied is None or applied.token != token:
            begun = self.bucket.parts_applied(owner)
            if begun is not None and begun.token == token:
                raise _torn(token, owner, "it goes on as one put")
            self._writers.check_new(writer, token)

    def _check_not_late(self, owner: str, token: Token | None) -> None:
        """Without a seal, a late duplicate is known by the token that came after it."""
        last = None if token is None else self.bucket.last_token(owner)
        if token is not None and last is not None and token < last.token:
            raise SealedBatch(
                f"batch {token.batch} of `{owner}` (epoch {token.epoch}) comes after its batch "
                f"{last.token.batch} (epoch {last.token.epoch}): a duplicate that is late, or "
                "batches out of order"
            )

    def owners(self) -> dict[str, int]:
        """Return the fenced owners and their epochs, for people: waits for nobody."""
        return self._writers.owners()

    def _check(self, writer: Writer, term: int, columns: Iterable[int]) -> None:
        self._check_term(term)
        self._writers.check(writer, columns)

    def _check_term(self, term: int) -> None:
        if term != self.term:
            raise NotLeader(
                f"bucket {self.key} is led at term {self.term}, and "
                f"the call is for term {term}: start over"
            )


class Overtaken(Exception):
    """Another attempt at the same token has begun; `put_id` is its id. Go on with that one."""

    def __init__(self, put_id: str) -> None:
        super().__init__(f"another attempt, {put_id}, has begun")
        self.put_id = put_id


def _torn(token: Token, owner: str, why: str) -> TornPut:
    return TornPut(
        f"a put of batch {token.batch} of `{owner}` (epoch {token.epoch}) was written in part, and "
        f"{why}: start over, which undoes it"
    )


def needs_writer() -> NotFenced:
    """Return the error of whoever writes to a table with column locks and holds none."""
    return NotFenced(
        "this table has column locks: write to it through a writer that holds one, or create it "
        "with column_locks=False"
    )


def put_led(
    parts: Sequence[LedUpdate],
    mapper: Mapper,
    *,
    writer: Writer | None,
    owner: str,
    token: Token | None,
    try_only: bool = False,
    seals: bool = False,
) -> list[BucketResult]:
    """Put to several buckets of this process, sorted by key; all try before one writes.

    `try_only`: write nothing, but raise what a put would raise now. `seals`: it is all of its
    batch, which is closed here before anybody else gets to write.
    """
    buckets = [part.bucket.bucket for part in parts]
    updates = [part.update for part in parts]
    try:
        with held(buckets):
            for part in parts:
                columns = [column.id for column in part.update.columns]
                part.bucket.check_put(writer, part.term, columns, owner, token)
            locked = writer is not None
            plans = plan_held(buckets, updates, mapper, owner=owner, token=token, locked=locked)
            if not try_only:
                results = commit_held(buckets, plans, mapper)
                if seals and writer is not None and token is not None:
                    for part in parts:
                        part.bucket.seal_held(writer, token.batch)
                return results
            ends = [bucket.end_offset for bucket in buckets]
    except InvalidValue:
        # A batch that was promised fits. Where it does not, the leader may be out of date.
        for bucket in buckets:
            bucket.confirm()
        raise
    return [BucketResult(base_offset=end, end_offset=end) for end in ends]
