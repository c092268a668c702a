"""The model of the writer's world: what the committed batches make of the table.

What a batch holds is known here beforehand; whether and when it is committed is read off the lock
records, transaction by transaction, in the manner of the executable specification.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from foundation.ids import BucketId, Token
from locks.column_locks.records import LockRecord

Key = tuple[int, int]
"""The partition (0 if there are none) and the key."""
Cell = tuple[Key, str]
Cells = dict[Cell, int]
Content = Mapping[Key, Mapping[str, int | None]]
"""What a batch does: per key and column an amount, or None for a delete."""
Records = Mapping[str, LockRecord]


@dataclass
class Model:
    """The table as committed batches left it, and what is known of those that are under way."""

    cells: Cells = field(default_factory=dict)
    done: dict[tuple[str, int, int], Token] = field(default_factory=dict)
    lives: Counter[str] = field(default_factory=Counter)
    applied: dict[tuple[str, Token], dict[BucketId, Content]] = field(default_factory=dict)
    promised: dict[tuple[str, Token], Content] = field(default_factory=dict)
    before: dict[tuple[str, Token], dict[Cell, int | None]] = field(default_factory=dict)

    def put(self, owner: str, token: Token, bucket: BucketId, content: Content) -> None:
        """A bucket says that it has a batch; what comes later with this token must not count."""
        self.applied.setdefault((owner, token), {}).setdefault(bucket, content)

    def observe(self, before: Records, after: Records) -> None:
        """Take a transaction on the lock records in."""
        for owner, now in after.items():
            was = before.get(owner, LockRecord())
            if now.prepared is not None and now.prepared != was.prepared:
                token = Token(*now.prepared.token)
                self._commit(owner, token, [self.promised[owner, token]])
            if now.batch != was.batch:
                assert now.batch > was.batch, f"batch {now.batch} of {owner} after {was.batch}"
                if was.prepared is None or was.prepared.token.batch != now.batch:
                    token = Token(now.epoch, now.batch)
                    self._commit(owner, token, self.applied.get((owner, token), {}).values())
        for owner in before.keys() - after.keys():
            self.lives[owner] += 1

    def _commit(self, owner: str, token: Token, contents: Iterable[Content]) -> None:
        at = (owner, self.lives[owner], token.batch)
        assert at not in self.done, f"batch {token.batch} of {owner} was committed twice"
        self.done[at] = token
        before = self.before[owner, token] = {}
        for content in contents:
            for key, amounts in content.items():
                for column, amount in amounts.items():
                    before.setdefault((key, column), self.cells.get((key, column)))
                    if amount is None:
                        self.cells.pop((key, column), None)
                    else:
                        self.cells[key, column] = self.cells.get((key, column), 0) + amount

    def token_of(self, owner: str, batch: int) -> Token | None:
        """Return under which token this owner has committed the batch, since it was forgotten."""
        return self.done.get((owner, self.lives[owner], batch))

    def visible(self, records: Records) -> Cells:
        """Return what a committed read shows: a promised batch is not read before it is written."""
        cells: dict[Cell, int | None] = dict(self.cells)
        cells.update(self._before_promises(records))
        return {cell: value for cell, value in cells.items() if value is not None}

    def _before_promises(self, records: Records) -> dict[Cell, int | None]:
        """Return the values before them of the cells that promised batches change."""
        pending = [
            (owner, record.prepared.token)
            for owner, record in records.items()
            if record.prepared is not None
        ]
        pending += [
            (debt.owner, debt.prepared.token)
            for record in records.values()
            for debt in record.debts
            if debt.prepared is not None
        ]
        return {
            cell: value
            for owner, token in pending
            for cell, value in self.before[owner, Token(*token)].items()
        }
