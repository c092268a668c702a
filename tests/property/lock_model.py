"""The model of the lock machine: what is written in the table's log, and what the locks owe of it.

What is written, and by whom, is modelled here; what becomes of it is read off the records,
transaction by transaction.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from foundation.ids import BucketId, Token
from locks.column_locks.records import Debt, DebtKind, LockRecord
from locks.encoding.offsets import Offsets

BUCKET = BucketId(0, 0)
Records = Mapping[str, LockRecord]


@dataclass
class Entry:
    """A write in the log. It is open until it is committed or undone."""

    owner: str
    columns: frozenset[int]
    open: bool = True


@dataclass
class LockObserver:
    """Judges every transaction on the lock records of the table.

    At any moment each unit of uncommitted work is in the tail or in the debts of exactly one held
    record, and work that was committed or undone is in none.
    """

    log: list[Entry] = field(default_factory=list)
    promises: dict[tuple[str, Token], bool] = field(default_factory=dict)
    commits: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    lives: Counter[str] = field(default_factory=Counter)
    committers: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    last_epoch: int = 0

    @property
    def ends(self) -> Offsets:
        """The log ends, as a writer reads them now."""
        return Offsets({BUCKET: len(self.log)})

    def has_open_work(self, owner: str) -> bool:
        """Whether anything of this owner is neither committed nor undone."""
        return any(entry.open and entry.owner == owner for entry in self.log)

    def last_committer(self, column: int) -> str | None:
        """Who committed this column last, of those who are not forgotten."""
        return max(self.committers.get(column, []), default=(0, None))[1]

    def observe(self, before: Records, after: Records, expired: frozenset[str]) -> None:
        """Take a transaction in; `expired`: whose lock has been expired since its last write."""
        changed = {o for o in {*before, *after} if before.get(o) != after.get(o)}
        acquirers = [o for o in changed if o in after and self._is_new(before.get(o), after[o])]
        assert len(acquirers) <= 1
        for owner in changed:
            old, new = before.get(owner), after.get(owner)
            if new is None:
                assert old is not None
                assert not old.held, "a held lock was forgotten"
                self._forget(owner)
            elif owner in acquirers:
                assert new.epoch > self.last_epoch, "an epoch did not rise"
                self.last_epoch = new.epoch
                self._succeed(owner, old, new)
            elif acquirers:
                assert old is not None
                assert old.held
                assert not new.held
                assert owner in expired, f"a live lock of {owner} was taken over"
                self._succeed(owner, old, new)
            else:
                assert old is not None
                assert len(changed) == 1
                self._hold(owner, old, new)
        self._check(after)

    @staticmethod
    def _is_new(old: LockRecord | None, new: LockRecord) -> bool:
        return old is None or old.epoch != new.epoch

    def _forget(self, owner: str) -> None:
        self.lives[owner] += 1
        for column, committers in self.committers.items():
            self.committers[column] = [one for one in committers if one[1] != owner]

    def _succeed(self, owner: str, old: LockRecord | None, new: LockRecord) -> None:
        """An incarnation came to its end: a prepared batch counts as committed, nothing else."""
        if old is None:
            assert new.batch == -1
        elif old.prepared is not None:
            self._committed(owner, old, old.prepared.token.batch)
            assert new.batch == old.prepared.token.batch, "a prepared batch did not count"
        else:
            assert new.batch == old.batch

    def _hold(self, owner: str, old: LockRecord, new: LockRecord) -> None:
        """The holder itself changed its record."""
        assert old.held, "a lock that nobody holds was changed"
        assert old.epoch == new.epoch
        assert new.batch >= old.batch, "a committed batch fell"
        if new.batch > old.batch:
            assert old.ready
            assert new.ready
            self._committed(owner, old, new.batch)
            self._close(Debt(kind=DebtKind.UNDO, owner=owner, columns=old.columns))
            if old.prepared is not None:
                assert new.batch == old.prepared.token.batch
                self.promises[owner, old.prepared.token] = True
        elif old.prepared is not None:
            assert new.prepared == old.prepared, "a prepared batch was taken back"
        if new.prepared is not None and old.prepared is None:
            self.promises[owner, new.prepared.token] = False
        if new.ready and not old.ready:
            for debt in old.debts:
                self._close(debt)
                if debt.prepared is not None:
                    self.promises[debt.owner, debt.prepared.token] = True

    def _committed(self, owner: str, old: LockRecord, batch: int) -> None:
        self.commits[owner, self.lives[owner], batch] += 1
        assert self.commits[owner, self.lives[owner], batch] == 1, "a batch was committed twice"
        for column in old.columns:
            self.committers.setdefault(column, []).append((old.epoch, owner))

    def _close(self, debt: Debt) -> None:
        for number, entry in enumerate(self.log):
            if _covers(debt, number, entry):
                entry.open = False

    def _check(self, records: Records) -> None:
        held = {owner: record for owner, record in records.items() if record.held}
        pins = Counter[int]()
        for record in held.values():
            pins.update(set(record.columns).union(*(debt.columns for debt in record.debts)))
        assert max(pins.values(), default=0) <= 1, f"a column is pinned twice: {pins}"
        unpaid: list[Debt] = []
        for owner, record in held.items():
            assert not (record.debts and record.ready)
            unpaid += record.debts
            if record.ready:
                unpaid.append(_tail(owner, record))
            for debt in record.debts:
                assert debt.owner == owner or debt.owner not in held, (
                    f"{debt.owner} works on while {owner} has a debt of its to pay"
                )
        undo = [debt for debt in unpaid if debt.kind is DebtKind.UNDO]
        for number, entry in enumerate(self.log):
            payers = sum(_covers(debt, number, entry) for debt in undo)
            assert payers == entry.open, f"write {number}, {entry}, has {payers} payers"
        promised = Counter(
            (debt.owner, debt.prepared.token) for debt in unpaid if debt.prepared is not None
        )
        for promise, kept in self.promises.items():
            assert promised[promise] == (not kept), f"{promise} has {promised[promise]} payers"
        assert set(promised) <= set(self.promises)


def _tail(owner: str, record: LockRecord) -> Debt:
    kind = DebtKind.UNDO if record.prepared is None else DebtKind.REDO
    return Debt(
        kind=kind,
        owner=owner,
        columns=record.columns,
        offsets=record.offsets,
        prepared=record.prepared,
    )


def _covers(debt: Debt, number: int, entry: Entry) -> bool:
    """Whether paying the debt would undo this write."""
    return (
        debt.kind is DebtKind.UNDO
        and debt.owner == entry.owner
        and bool(entry.columns.intersection(debt.columns))
        and number >= debt.offsets.get(BUCKET, 0)
    )
