"""What is known of an owner's changes in a bucket without its log: where they begin and end.

A reader that looks back wants to know whether an owner has changed anything since an offset; and
from which offset on it has put under later epochs than the reader knows of. Epochs of an owner rise
along the log, so that is where the first later one begins. There are few: a new epoch comes with a
new start of the writer.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

# More are not kept: a job may restart for years.
MOST_EPOCHS = 64


@dataclass(frozen=True, kw_only=True)
class OwnerWork:
    """`end_offset`: where the owner's last change ends.

    `epochs` and `bases`: the last epochs that the owner has put under, and where the first put of
    each begins. `complete`: these are all; else there were earlier ones.
    """

    end_offset: int = 0
    epochs: tuple[int, ...] = ()
    bases: tuple[int, ...] = ()
    complete: bool = True

    def with_change(self, epoch: int | None, base_offset: int, end_offset: int) -> "OwnerWork":
        """Return what is known after another change; `epoch`: if it is a put by a lock's holder."""
        ended = replace(self, end_offset=end_offset)
        if epoch is None or (self.epochs and epoch <= self.epochs[-1]):
            return ended
        return replace(
            ended,
            epochs=(*self.epochs, epoch)[-MOST_EPOCHS:],
            bases=(*self.bases, base_offset)[-MOST_EPOCHS:],
            complete=self.complete and len(self.epochs) < MOST_EPOCHS,
        )

    def begin_of(self, epoch: int) -> int | None:
        """Return an offset before which there is no put of this epoch or a later one.

        None: there is none at all.
        """
        at = bisect_left(self.epochs, epoch)
        if at == 0 and not self.complete:
            return 0
        return None if at == len(self.epochs) else self.bases[at]


def to_numbers(work: OwnerWork) -> list[int]:
    """Return it as numbers, to be stored."""
    pairs = zip(work.epochs, work.bases, strict=True)
    return [int(work.complete), work.end_offset, *(number for pair in pairs for number in pair)]


def from_numbers(numbers: Sequence[int]) -> OwnerWork:
    """Return what was stored."""
    complete, end_offset, *pairs = numbers
    return OwnerWork(
        end_offset=end_offset,
        epochs=tuple(pairs[0::2]),
        bases=tuple(pairs[1::2]),
        complete=bool(complete),
    )
