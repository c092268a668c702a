"""The client of a cluster: finds its tables and servers through ZooKeeper.

cluster = connect("127.0.0.1:2181")
orders = cluster.create_table("orders", schema)
orders.lookup({"customer_id": [7]})
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from foundation.allocator import keep_freed_memory
from foundation.errors import ServerUnavailable, TableExists, UnknownTable
from foundation.parallel import at_once
from locks.catalog.definitions import CatalogTable, TableDefinition
from locks.cluster.presence import await_cluster
from locks.coordinator import Coordinator
from locks.encoding.framing import read_text
from locks.store.base import Node
from locks.store.paths import STORAGE
from locks.store.zookeeper import ZooKeeperStore
from merge_engine.schema.schema import Schema
from merge_engine.storage.objects import ObjectStorage, open_storage
from recovery.description import TableDescription, differences
from recovery.writer.table_writer import TableWriter
from server.client.asking import Result, ask
from server.client.connections import Broken, Connections, ServerCredentials
from server.client.leader_calls import LeaderCalls
from server.client.remote_table import RemoteTable
from server.client.writer_access import RemoteAccess
from server.protocol.calls import Status
from server.protocol.definitions import ClusterTable, define, retaining

PATIENCE_S = 5.0
_ATTEMPTS = 5


def connect(
    address: str,
    *,
    token: str | None = None,
    tls_root: str | Path | None = None,
    tls_certificate: str | Path | None = None,
    tls_key: str | Path | None = None,
    credentials: tuple[str, str] | None = None,
    deadline_s: float = 30.0,
    attempt_s: float = 10.0,
    storage_settings: Mapping[str, Any] | None = None,
    patience_s: float | None = PATIENCE_S,
    create: bool = False,
) -> "Cluster":
    """Connect to the cluster whose ZooKeeper is at `host:port[,host:port...][/chroot]`.

    `token`, `tls_root`: for servers that want a token, and that speak TLS; `tls_certificate` and
    `tls_key`: for those that want to see a client's. `credentials`: user and password for
    ZooKeeper. `deadline_s`: how long a call looks for a leader that answers; `attempt_s`: how long
    it waits for one answer. `storage_settings`: what obstore needs to reach the cluster's object
    store, for scans of snapshots, which read it themselves. `patience_s`: how long to look for a
    ZooKeeper where there is none at all, and for a cluster below the chroot (None: for the
    deadline). `create`: make the cluster if there is none, as servers do.
    """
    return Recipe.of(
        address,
        token=token,
        tls_root=tls_root,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        credentials=credentials,
        deadline_s=deadline_s,
        attempt_s=attempt_s,
        storage_settings=storage_settings,
    ).connect(patience_s=patience_s, create=create)


class Cluster:
    """A connection to a cluster. Safe for threads; pickled, it is the address to connect to."""

    def __init__(
        self,
        address: str,
        *,
        server_credentials: ServerCredentials,
        credentials: tuple[str, str] | None = None,
        deadline_s: float = 30.0,
        attempt_s: float = 10.0,
        storage_settings: Mapping[str, Any] | None = None,
        patience_s: float | None = None,
        create: bool = False,
    ) -> None:
        keep_freed_memory()
        self._settings: dict[str, Any] = {
            "storage_settings": storage_settings,
            "server_credentials": server_credentials,
            "credentials": credentials,
            "deadline_s": deadline_s,
            "attempt_s": attempt_s,
        }
        self.address = address
        self._connecting = threading.Lock()
        self._closed = False
        self._store, self._coordinator = self._connect(patience_s, create=create)
        self.calls = LeaderCalls(
            lambda: self.coordinator,
            Connections(server_credentials),
            deadline_s=deadline_s,
            attempt_s=attempt_s,
        )

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator; over another session with ZooKeeper when the last one was lost.

        Nothing of a client rests on its session. What was made over a lost one stays lost.
        """
        with self._connecting:
            if self._store.lost and not self._closed:
                self._store, self._coordinator = self._connect()
            return self._coordinator

    def _connect(
        self, patience_s: float | None = None, *, create: bool = False
    ) -> tuple[ZooKeeperStore, Coordinator]:
        """Return a session, and what is kept there.

        With patience for as long as the deadline, unless told otherwise: who comes back has been
        there before.
        """
        deadline_s = self._settings["deadline_s"]
        store = ZooKeeperStore(
            self.address,
            credentials=self._settings["credentials"],
            deadline_s=deadline_s,
            patience_s=patience_s,
            create=create,
        )
        try:
            if not create:
                patience_s = PATIENCE_S if patience_s is None else patience_s
                await_cluster(store, self.address, min(patience_s, deadline_s))
            return store, Coordinator(store, deadline_s=deadline_s)
        except BaseException:
            store.close()
            raise

    def storage(self) -> ObjectStorage:
        """Return the object store that has the cluster's logs and snapshots."""
        node = self._ask(_read_storage)
        if node is None:
            raise ServerUnavailable("no tablet server has ever joined this cluster; start one")
        location = read_text(STORAGE, node.data)
        return open_storage(location, **(self._settings["storage_settings"] or {}))

    def __reduce__(self) -> tuple[Any, ...]:
        return Recipe.connect, (self.recipe,)

    @property
    def recipe(self) -> "Recipe":
        """How to connect to the same cluster from elsewhere."""
        return Recipe(self.address, self._settings)

    def create_table(
        self,
        name: str,
        schema: Schema,
        *,
        buckets: int = 4,
        column_locks: bool = True,
        options: Mapping[str, str] | None = None,
        retention: timedelta | str | None = None,
        if_not_exists: bool = False,
    ) -> RemoteTable:
        """Create a table. The number of buckets never changes.

        Without column locks anybody writes any column at any time, and nothing can be undone for
        an owner but by its own hand: at least once, not exactly once. `retention`: how long
        partitions of a date or time are kept. `if_not_exists`: where there is one
        of this name, return that; TableExists if it is another than was asked for.
        """
        definition = define(schema, buckets, column_locks=column_locks, options=options or {})
        if retention is not None:
            definition = retaining(definition, retention)
        if not if_not_exists:
            return self._remote(ClusterTable(self.coordinator.tables.create(name, definition)))
        for _ in range(_ATTEMPTS):
            with suppress(TableExists):
                return self._remote(ClusterTable(self.coordinator.tables.create(name, definition)))
            with suppress(UnknownTable):  # Dropped in between.
                return _as_wanted(self.table(name), definition)
        raise TableExists(f"table {name} is created and dropped again and again by others")

    def table(self, name: str) -> RemoteTable:
        """Return the table of this name."""
        return self._remote(ClusterTable(self._ask(lambda there: there.tables.get(name))))

    def table_by_id(self, table_id: int) -> RemoteTable:
        """Return the table of this id, whatever it is called by now."""
        table = self._ask(lambda there: there.tables.get_by_id(table_id))
        return self._remote(ClusterTable(table))

    def again(self) -> "Cluster":
        """Return another connection to the same cluster, for when this one's session is lost."""
        return self.recipe.connect()

    def writer(
        self,
        table: str | RemoteTable,
        *,
        owner_id: str,
        columns: Sequence[str],
        **settings: Any,
    ) -> TableWriter:
        """Return a writer that holds a lock on these columns; start it by `with` or `start`.

        `settings` are those of `TableWriter`: ttl_ms, handover, deadline_s, redo.
        """
        remote = table if isinstance(table, RemoteTable) else self.table(table)
        return TableWriter(RemoteAccess(self, remote), owner_id, columns, **settings)

    def tables(self) -> list[TableDescription]:
        """Return what all tables are, by name."""

        def describe(there: Coordinator) -> list[TableDescription]:
            found = []
            for table in map(ClusterTable, there.tables.all()):
                partitions = None
                with suppress(UnknownTable):  # Dropped since it was listed.
                    if table.schema.partition_by:
                        partitions = len(there.partitions.ids(table.table))
                    found.append(table.describe(partitions))
            return sorted(found, key=lambda one: one.name)

        return self._ask(describe)

    def rename_table(self, old: str, new: str) -> RemoteTable:
        """Give a table another name. Whoever has it open goes on: by its id, as its locks do."""
        table = self._ask(lambda there: there.tables.get(old))
        return self._remote(ClusterTable(self.coordinator.tables.rename(table, new)))

    def list_tables(self) -> list[str]:
        """Return the names of all tables."""
        return self._ask(lambda there: there.tables.names())

    def drop_table(self, name: str, *, force: bool = False) -> None:
        """Drop a table with its data; refused while a column lock is live, unless forced."""
        self.coordinator.drop_table(self.coordinator.tables.get(name), force=force)

    def status(self) -> list[dict[str, Any]]:
        """Return what each live server says of itself; an `error` for one that does not answer.

        All are asked side by side: one that says nothing keeps nobody for longer than `attempt_s`.
        """
        return at_once(self.status_of, self.server_addresses())

    def server_addresses(self) -> list[str]:
        """Return where the live servers are, as ZooKeeper knows them."""
        return [server.address for server in self._ask(lambda there: there.servers.all())]

    def status_of(self, address: str) -> dict[str, Any]:
        """Return what the server at this address says of itself, or an `error`."""
        timeout_s = self._settings["attempt_s"]
        try:
            answer = self.calls.connections.call(address, Status(), timeout_s)
        except Broken as exc:
            return {"address": address, "error": str(exc)}
        return dict(answer.status)

    @property
    def connected(self) -> bool:
        """Whether ZooKeeper is there, as far as is known here; nobody is asked."""
        return self._store.connected

    def close(self) -> None:
        """End the connections and the session. Closing twice is fine."""
        self.calls.close()
        with self._connecting:
            self._closed = True
            self._store.close()

    def __repr__(self) -> str:
        return f"<Cluster at {self.address}{', closed' if self._closed else ''}>"

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _remote(self, table: ClusterTable) -> RemoteTable:
        return RemoteTable(self, table)

    def _ask(self, question: Callable[[Coordinator], Result]) -> Result:
        return ask(lambda: self.coordinator, question)


def _as_wanted(table: RemoteTable, definition: TableDefinition) -> RemoteTable:
    """Return the table if it is what was asked for; TableExists, which says how it differs."""
    asked = CatalogTable(name=table.name, table_id=0, version=0, definition=definition)
    found = differences(table.definition.describe(), ClusterTable(asked).describe())
    if found:
        raise TableExists(
            f"there is a table {table.name} already, and it is another than was asked for: "
            + "; ".join(found)
        )
    return table


def _read_storage(coordinator: Coordinator) -> Node | None:
    coordinator.store.sync()
    return coordinator.store.read(STORAGE)


@dataclass(frozen=True)
class Recipe:
    """How to connect to a cluster: what travels in the place of a connection."""

    address: str
    settings: Mapping[str, Any] = field(repr=False)  # Credentials are among them.

    @classmethod
    def of(
        cls,
        address: str,
        *,
        token: str | None = None,
        tls_root: str | Path | None = None,
        tls_certificate: str | Path | None = None,
        tls_key: str | Path | None = None,
        **settings: Any,
    ) -> "Recipe":
        """Return how to connect with the arguments of `connect`."""
        server_credentials = ServerCredentials(
            token=token,
            tls_root=None if tls_root is None else Path(tls_root),
            tls_certificate=None if tls_certificate is None else Path(tls_certificate),
            tls_key=None if tls_key is None else Path(tls_key),
        )
        return cls(address, {"server_credentials": server_credentials, **settings})

    def connect(self, *, patience_s: float | None = None, create: bool = False) -> Cluster:
        """Connect; arguments as for `connect`."""
        return Cluster(self.address, patience_s=patience_s, create=create, **self.settings)
