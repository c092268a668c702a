"""Sends calls to the buckets of a table: knows where these are, and asks whoever leads them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from foundation.errors import NotFenced, PartitionGone
from foundation.ids import BucketId, LeadKey
from locks.coordinator import Coordinator
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.merging.routing import Route
from merge_engine.schema.schema import Schema
from merge_engine.storage.objects import ObjectStorage
from recovery.reader.cut import Cut
from recovery.writer.access import Answers, Grant
from recovery.writer.table_writer import TableWriter
from server.client.asking import ask
from server.client.leader_calls import LeaderCalls
from server.protocol.calls import BucketsAnswer, BucketsCall
from server.protocol.definitions import ClusterTable
from server.protocol.messages import Message

Answer = TypeVar("Answer", bound=Message)
Result = TypeVar("Result")
Send = Callable[[str, Sequence[BucketId], float], Answer]
"""Sends a server its share of a call: to an address, for buckets, within so many seconds."""


class ClusterConnection(Protocol):
    """What a table needs of its cluster."""

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator, over this client's session."""

    @property
    def calls(self) -> LeaderCalls:
        """The calls to servers."""

    def storage(self) -> ObjectStorage:
        """The object store that has the cluster's logs and snapshots."""

    def writer(
        self, table: Any, *, owner_id: str, columns: Sequence[str], **settings: Any
    ) -> TableWriter:
        """Return a writer of these columns."""

    def close(self) -> None:
        """End the connection."""


class TableCaller:
    """A table of a cluster, as far as calls to its buckets need to know it. Safe for threads.

    `table`: as the coordinator defines it, and as this client last saw it.
    """

    def __init__(self, cluster: ClusterConnection, table: ClusterTable) -> None:
        self.cluster = cluster
        self.table = table
        self._partitions: dict[bytes, int] = {}
        self._listed: tuple[Cut, Mapping[bytes, int]] | None = None
        if not table.schema.partition_by:
            self._partitions = {b"": 0}

    @property
    def schema(self) -> Schema:
        """The schema as this client last saw it."""
        return self.table.schema

    @property
    def calls(self) -> LeaderCalls:
        """The calls to servers."""
        return self.cluster.calls

    def refresh(self) -> None:
        """Look again at the definition: others may have altered it."""
        table_id = self.table.table_id
        self.table = ClusterTable(self._ask(lambda there: there.tables.get_by_id(table_id)))

    def knowing(self, version: int) -> SchemaHistory:
        """Return all schemas up to this version at least; UnknownSchema if there is none such."""
        if version > self.schema.version:
            self.refresh()
        self.table.history.check_knows(version)
        return self.table.history

    def cut(self) -> Cut:
        """Return where the table stands now, as far as owners of locks go."""
        if not self.table.locked:
            return Cut(table=self.table.uid, epoch=None, time_ms=0)
        locks = self._ask(lambda there: there.locks.read(self.table.table))
        return Cut.of_locks(self.table.uid, locks)

    def _ask(self, question: Callable[[Coordinator], Result]) -> Result:
        return ask(lambda: self.cluster.coordinator, question)

    # --- Calls ----------------------------------------------------------------------------------

    def call(
        self,
        call: BucketsCall[BucketsAnswer[Result]],
        *,
        patient: bool = True,
    ) -> Answers[Result]:
        """Call the buckets; return what each answered, and the sessions of the servers."""
        return together(self.ask(call, patient=patient))

    def ask(
        self,
        call: BucketsCall[Answer],
        *,
        send: Send[Answer] | None = None,
        **how: bool,
    ) -> list[tuple[Sequence[BucketId], Answer]]:
        """Send each server its share of a call; return the shares, and the answers to them.

        `send`: if there is more to send than the call. `how`: as for `LeaderCalls.scatter`. A
        bucket that nobody leads because it is no more is not waited for: see `check_buckets`.
        """
        shares: list[tuple[Sequence[BucketId], Answer]] = []

        def send_share(
            address: str, keys: Sequence[LeadKey], timeout_s: float
        ) -> dict[LeadKey, None]:
            buckets = [key.bucket for key in keys]
            if send is None:
                answer = self.calls.connections.call(address, call.only(buckets), timeout_s)
            else:
                answer = send(address, buckets, timeout_s)
            shares.append((buckets, answer))
            return dict.fromkeys(keys)

        self.calls.scatter(
            [LeadKey(call.table_id, bucket) for bucket in call.buckets],
            self.table.buckets,
            send_share,
            check_moved=self.check_buckets,
            **how,
        )
        return shares

    # --- Buckets --------------------------------------------------------------------------------

    def bucket_ids(
        self,
        cut: Cut | None,  # noqa: ARG002
        keys: Collection[bytes] | None = None,
    ) -> list[BucketId]:
        """Return all buckets of all partitions, or of those with these keys, as they are now.

        `cut`: where they are to be read, for it has to be taken first: then each bucket is there
        that it has rows of, unless it was dropped. None: each is read as it is.
        """
        partitions = self.read_partitions()
        return [
            BucketId(partitions[key], number)
            for key in sorted(partitions)
            if keys is None or key in keys
            for number in range(self.table.buckets)
        ]

    def partition_ids(self) -> frozenset[int]:
        """Return the ids of the partitions, as they are now; 0 is that of a table without."""
        return frozenset(self.read_partitions().values())

    def read_partitions(self) -> dict[bytes, int]:
        """Return the ids of the partitions by their keys, as they are now."""
        if self.schema.partition_by:
            self._partitions = self._ask(lambda there: there.partitions.ids(self.table.table))
        return self._partitions

    def check_buckets(self, keys: Sequence[LeadKey]) -> None:
        """Raise if buckets have no leader because they are no more: UnknownTable, PartitionGone.

        Asked by all calls for which no leader is found, of tables with and without partitions.
        """
        if not self.schema.partition_by:
            self._ask(lambda there: there.tables.check(self.table.table))
            return
        there = set(self.read_partitions().values())
        gone = sorted({key.bucket.partition for key in keys} - there)
        if gone:
            self._listed = None
            raise PartitionGone(
                f"the partitions with ids {gone} of table {self.table.name} were dropped meanwhile"
            )

    def find(self, target: Route) -> BucketId | None:
        """Return the bucket of a route; None if there is no such partition."""
        if target.partition_key not in self._partitions:
            self.read_partitions()
        partition = self._partitions.get(target.partition_key)
        return None if partition is None else BucketId(partition, target.bucket)

    def find_all(self, targets: Sequence[Route], cut: Cut | None) -> list[tuple[BucketId, Route]]:
        """Return the buckets of those routes that have one, each with its route.

        `cut`: where they are to be read, as for `bucket_ids`. Partitions are listed once for all
        calls with this very cut, as long as none of them turns out to be gone.
        """
        if cut is None:
            found = [(self.find(target), target) for target in targets]
            return [(bucket, target) for bucket, target in found if bucket is not None]
        listed = self._listed
        # Not one that is equal: without locks, cuts of different times are.
        if listed is None or listed[0] is not cut:
            listed = self._listed = cut, dict(self.read_partitions())
        ids = listed[1]
        return [
            (BucketId(ids[target.partition_key], target.bucket), target)
            for target in targets
            if target.partition_key in ids
        ]

    def find_or_create(self, target: Route) -> BucketId:
        """Return the bucket of a route; its partition is created if there is none."""
        found = self.find(target)
        if found is not None:
            return found
        return BucketId(self.create_partition(target.partition_key), target.bucket)

    def find_fenced(self, target: Route, grant: Grant) -> BucketId:
        """Return the bucket of a route; NotFenced if the grant is not for it."""
        found = self.find(target)
        if found is None:
            raise NotFenced(
                "the batch has rows of a partition that does not exist; its writer creates it first"
            )
        if found not in grant.terms:
            raise NotFenced(
                f"bucket {found} was not fenced: its partition is new; its "
                "writer creates and fences it first"
            )
        return found

    def create_partition(self, key: bytes) -> int:
        """Create a partition, unless there is one of this key; return its id."""
        partition = self.cluster.coordinator.partitions.create(self.table.table, key)
        self._partitions[key] = partition
        return partition

    def drop_partition(self, key: bytes) -> bool:
        """Drop a partition and its data; False if there is none of this key."""
        dropped = self.cluster.coordinator.partitions.drop(self.table.table, key)
        self._partitions.pop(key, None)
        return dropped is not None

    def drop_partitions(self, partitions: Mapping[bytes, int]) -> list[bytes]:
        """Drop these partitions, by key and id, in one write; return those that were there."""
        dropped = self.cluster.coordinator.partitions.drop_all(self.table.table, partitions)
        for key in partitions:
            self._partitions.pop(key, None)
        return dropped


def together(
    shares: Sequence[tuple[Sequence[BucketId], BucketsAnswer[Result]]],
) -> Answers[Result]:
    """Return the answers to all shares of a call as one."""
    results = {
        bucket: result
        for buckets, answer in shares
        for bucket, result in zip(buckets, answer.results, strict=True)
    }
    return Answers(results, frozenset(answer.session for _, answer in shares))
