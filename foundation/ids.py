"""Names of things that all packages speak of: buckets, and the tokens of batches."""

from typing import NamedTuple


class BucketId(NamedTuple):
    """A bucket of a table: the id of its partition (0 if there are none), and its number."""

    partition: int
    number: int

    def __str__(self) -> str:
        return f"{self.partition}/{self.number}"


class LeadKey(NamedTuple):
    """A bucket among those of all tables. As text: `partition/number of table id`."""

    table_id: int
    bucket: BucketId

    def __str__(self) -> str:
        return f"{self.bucket} of table {self.table_id}"

    @property
    def node_name(self) -> str:
        """What it is called in ZooKeeper: `table-partition-number`."""
        return f"{self.table_id}-{self.bucket.partition}-{self.bucket.number}"


class Token(NamedTuple):
    """(epoch, batch) of the incarnation that first wrote, or promised, a batch.

    Not (owner, batch): after an undo the same batch is written again, and is another one.
    """

    epoch: int
    batch: int
