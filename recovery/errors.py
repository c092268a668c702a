"""Why a bucket's leader refuses a writer, split by what the writer should do.

TallybookError
└── WriterRefused      nothing was written
    ├── NotLeader      this server does not lead the bucket, or not at that term: ask who does
    ├── NotFenced      the leader does not know this writer: start over under a new epoch
    ├── OldEpoch       a newer epoch holds the owner or a column: stop for good
    ├── WrongColumns   columns that this writer's lock does not have: fix the call
    ├── NotReady       own batches come after recovery: finish it first
    ├── RecoveryOver   a payment of debts that arrives after recovery: nobody waits for it
    ├── SealedBatch    a task that arrives after its batch was sealed: nobody waits for it
    └── TornPut        some parts of a put were written, and the rest cannot be: start over
"""

from merge_engine import TallybookError


class WriterRefused(TallybookError):
    """A leader refused a call, and nothing was written by it."""


class NotLeader(WriterRefused):
    """This server does not lead the bucket, or leads it at another term. Find the leader."""


class NotFenced(WriterRefused):
    """The leader was never told of this writer. Acquire again, recover, and run the batch again."""


class OldEpoch(WriterRefused):
    """A newer epoch has the owner or one of its columns. Stop for good."""


class WrongColumns(WriterRefused):
    """A column that the writer's lock, or the debt it pays, does not have. Fix the call."""


class NotReady(WriterRefused):
    """A batch of this epoch before its recovery is over. Pay the debts and read the ends first."""


class RecoveryOver(WriterRefused):
    """A debt that is paid after recovery ended. Whoever sent it is no longer waited for."""


class SealedBatch(WriterRefused):
    """A batch that is sealed takes no more rows. Whoever sent them is no longer waited for."""


class TornPut(WriterRefused):
    """Some parts of a put were written, and the rest cannot be. Start over, which undoes them."""
