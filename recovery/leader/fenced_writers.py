"""What a bucket's leader remembers of writers, and whom it refuses for it.

The rules are those of `Bucket` in `docs/spec/protocol.py`, in its words: `fence`, `term`,
`closed`, `seal`. All of it is the leader's memory and goes with its term: a new leader knows nobody
and refuses everybody, until they start over.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from foundation.errors import NotFenced, NotReady, OldEpoch, RecoveryOver, SealedBatch, WrongColumns
from foundation.ids import Token


class Writer(NamedTuple):
    """An incarnation of an owner: goes with every call, for the leader to judge."""

    owner: str
    epoch: int


@dataclass
class _Known:
    """A writer that was fenced: its columns and its debts', and how far it has got."""

    epoch: int
    columns: set[int] = field(default_factory=set)
    recovered: bool = False
    sealed: int = -1


class FencedWriters:
    """The writers that one leader knows. The bucket serialises the calls."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._epochs: dict[int, int] = {}

    def fence(self, writer: Writer, columns: Iterable[int]) -> None:
        """From here on, refuse older epochs of this owner and of these columns.

        A fence that arrives twice finds what the first one has let the writer do since.
        """
        known = self._known.get(writer.owner)
        if known is not None and writer.epoch < known.epoch:
            raise OldEpoch(
                f"`{writer.owner}` was fenced with epoch {known.epoch}; epoch {writer.epoch} is "
                "over: stop for good"
            )
        if known is None or known.epoch < writer.epoch:
            known = self._known[writer.owner] = _Known(writer.epoch)
        known.columns.update(columns)
        for column in columns:
            self._epochs[column] = max(self._epochs.get(column, 0), writer.epoch)

    def check(self, writer: Writer, columns: Iterable[int]) -> None:
        """Raise unless this writer is the one fenced last, for these columns."""
        known = self._find(writer)
        wrong = sorted(set(columns) - known.columns)
        if wrong:
            raise WrongColumns(
                f"`{writer.owner}` (epoch {writer.epoch}) was not fenced for the columns with ids "
                f"{wrong}: lock them first"
            )
        for column in columns:
            newer = self._epochs.get(column, 0)
            if newer > writer.epoch:
                raise OldEpoch(
                    f"the column with id {column} was taken over at epoch {newer}; "
                    f"`{writer.owner}` (epoch {writer.epoch}) has lost it: stop for good"
                )

    def check_new(self, writer: Writer, token: Token) -> None:
        """Raise unless a token that was not applied yet may still be.

        The writer's own come after its recovery; those of other epochs are debts, paid before.
        """
        known = self._find(writer)
        if token.epoch == writer.epoch and not known.recovered:
            raise NotReady(
                f"batch {token.batch} of `{writer.owner}` (epoch {writer.epoch}) comes before its "
                "recovery is over: pay the debts and read the log ends first"
            )
        if token.epoch == writer.epoch and token.batch <= known.sealed:
            raise SealedBatch(
                f"batch {token.batch} of `{writer.owner}` (epoch {writer.epoch}) is sealed, with "
                f"all up to batch {known.sealed}: this part of it came too late"
            )
        if token.epoch != writer.epoch:
            self.check_payment(writer)

    def check_payment(self, writer: Writer) -> None:
        """Raise if recovery is over: its end was read, so nothing may be paid after it."""
        if self._find(writer).recovered:
            raise RecoveryOver(
                f"the recovery of `{writer.owner}` (epoch {writer.epoch}) is over: this payment "
                "came too late"
            )

    def recovered(self, writer: Writer) -> None:
        """End the recovery of this epoch: from here on it writes batches and pays no debts."""
        self._find(writer).recovered = True

    def seal(self, writer: Writer, batch: int) -> None:
        """Refuse this and all earlier batches of the epoch from here on."""
        known = self._find(writer)
        known.sealed = max(known.sealed, batch)

    def owners(self) -> dict[str, int]:
        """Return the owners that were the last to be fenced for a column, and their epochs.

        For people, who want to know who may write: of former owners there may be any number.
        """
        # Copied at once: whoever asks does not wait for the bucket.
        known, epochs = self._known.copy(), self._epochs.copy()
        return {
            owner: one.epoch
            for owner, one in known.items()
            if any(epochs.get(column) == one.epoch for column in one.columns.copy())
        }

    def _find(self, writer: Writer) -> _Known:
        known = self._known.get(writer.owner)
        if known is None or known.epoch < writer.epoch:
            raise NotFenced(
                f"`{writer.owner}` (epoch {writer.epoch}) was not fenced at this leader, which may "
                "be new: start over"
            )
        if known.epoch > writer.epoch:
            raise OldEpoch(
                f"`{writer.owner}` was fenced with epoch {known.epoch}; epoch {writer.epoch} is "
                "over: stop for good"
            )
        return known
