"""The real coordination store: a ZooKeeper session through kazoo.

What kazoo does by itself is not enough for correctness, so three things are settled here. Requests
wait for the connection within a deadline. A transaction that was sent and not answered is an
UnknownOutcome, and whoever wants to know reads back through this same client, whose requests stay
in order. And a lost session ends the store for good, rather than going on in another one.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    BadVersionError,
    ConnectionClosedError,
    ConnectionLoss,
    KazooException,
    NoAuthError,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    OperationTimeoutError,
    RequestTimeoutError,
    RolledBackError,
    RuntimeInconsistency,
    SessionExpiredError,
    SessionMovedError,
)
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import KazooState
from kazoo.retry import KazooRetry
from kazoo.security import Permissions, make_digest_acl

from foundation import forks
from foundation.deadlines import deadline_in, remaining
from foundation.errors import (
    AccessDenied,
    InvalidInput,
    SessionLost,
    TallybookError,
    Unavailable,
    UnknownOutcome,
)
from locks.store.base import Check, Conflict, Create, Node, Operation, Write, check_size
from locks.store.reaching import in_words, look
from locks.store.watch import Watch

logger = logging.getLogger(__name__)

# Where servers and the command line look for user:password.
CREDENTIALS_VARIABLE = "TALLYBOOK_ZOOKEEPER_CREDENTIALS"
CLOCK_PATH = "/clock"
_LOOK_S = 1.0
_CHROOTS_LOOKED_AT = 100
READS_AT_ONCE = 500  # ZooKeeper has a limit of 1,000 requests under way, of all clients together.
# How much of a session's time-out a host may take to answer, when one connects to it.
_CONNECT_PART, _SHORTEST_CONNECT_S = 0.25, 1.0
_LOST_ANSWER = (
    ConnectionLoss,
    KazooTimeoutError,
    OperationTimeoutError,
    RequestTimeoutError,
    SessionMovedError,
)
_LOST_SESSION = (SessionExpiredError, ConnectionClosedError, AuthFailedError)
_CHANGES = Permissions.WRITE | Permissions.CREATE | Permissions.DELETE | Permissions.ADMIN
_CONSEQUENCES = (RolledBackError, RuntimeInconsistency)
_CONDITIONS = (
    BadVersionError,
    NoChildrenForEphemeralsError,
    NoNodeError,
    NodeExistsError,
    NotEmptyError,
)


class ZooKeeperStore:
    """A session with ZooKeeper at `host:port[,host:port...][/chroot]`; a CoordinationStore."""

    def __init__(
        self,
        hosts: str,
        *,
        session_timeout_s: float = 10.0,
        deadline_s: float = 30.0,
        credentials: tuple[str, str] | None = None,
        patience_s: float | None = None,
        create: bool = True,
    ) -> None:
        """Connect within the deadline, or raise Unavailable; InvalidInput if it is no address.

        `patience_s`: how long to try where there is no ZooKeeper at all (None: for the deadline).
        `create`: make the chroot, unless it is there; without it, nothing is written here.
        """
        self._hosts = hosts
        self._process = os.getpid()
        self._deadline_s = deadline_s
        self._lost = threading.Event()
        self._ending = threading.Lock()
        self._watches: set[Watch] = set()
        # kazoo's own chroot has to exist before it can be used; ours is a prefix.
        servers, slash, chroot = hosts.partition("/")
        self._root = f"{slash}{chroot}".rstrip("/")
        self._session_timeout_s = session_timeout_s
        self._has_credentials = credentials is not None
        try:
            self._client = _client(servers, session_timeout_s, credentials)
        except ValueError as exc:
            raise InvalidInput(
                f"{hosts!r} is no address of ZooKeeper, host:port[,host:port...][/chroot]: {exc}"
            ) from exc
        self._observe_negotiation()
        self._hurry_connecting()
        self._client.add_listener(self._on_state)
        try:
            self._start(servers, deadline_s if patience_s is None else patience_s)
            if create:
                self._answer(lambda: self._client.ensure_path_async(self._root + CLOCK_PATH))
        except BaseException:
            # kazoo does not leave an attempt to connect: whoever wants to know why is told first.
            closing = threading.Thread(target=self.close, name="zookeeper-close", daemon=True)
            closing.start()
            closing.join(_LOOK_S)
            raise

    def _start(self, servers: str, patience_s: float) -> None:
        """Wait for the session; who is at the addresses is looked into only if that takes long."""
        begun = time.monotonic()
        deadline = deadline_in(self._deadline_s)
        impatient = min(deadline, begun + patience_s)
        connected = self._client.start_async()
        while not connected.wait(max(0.0, min(_LOOK_S, impatient - time.monotonic()))):
            now = time.monotonic()
            if now < impatient:
                continue
            found = look(servers, min(_LOOK_S, self._deadline_s))
            if now < deadline and any(one.zookeeper for one in found):
                impatient = deadline  # One that has no quorum yet is waited for.
                continue
            waited = f"{now - begun:.1g}" if now - begun < 1 else f"{now - begun:.0f}"
            raise Unavailable(f"no ZooKeeper at {self._hosts} within {waited} s: {in_words(found)}")

    def chroots_with(self, path: str) -> list[str]:
        """Return where in this ZooKeeper there is such a node: below its root, or one level down.

        What these credentials may not see is left out. For messages to people.
        """
        try:
            names = self._answer(lambda: self._client.get_children_async("/"))
            found = [""] + [f"/{name}" for name in sorted(names)[:_CHROOTS_LOOKED_AT]]
            return [
                chroot or "/"
                for chroot in found
                if self._answer(partial(self._client.exists_async, chroot + path)) is not None
            ]
        except (AccessDenied, NoNodeError):
            return []

    def read(self, path: str) -> Node | None:
        [answer] = self._ask_many(self._client.get_async, [path])
        return _node(answer)

    def read_many(self, paths: Sequence[str]) -> list[Node | None]:
        return list(map(_node, self._ask_many(self._client.get_async, paths)))

    def world_writable(self, paths: Sequence[str]) -> list[str]:
        """Return those nodes that anybody may change, delete from or put others below.

        The empty path is the root: the chroot's node, or ZooKeeper's own. Missing nodes are passed
        over. AccessDenied if one is closed to these credentials.
        """
        answers = self._ask_many(self._client.get_acls_async, paths)
        return [
            path
            for path, answer in zip(paths, answers, strict=True)
            if answer is not None and any(map(_lets_anybody_write, answer[0]))
        ]

    def _ask_many(self, request: Callable[[str], Any], paths: Sequence[str]) -> list[Any]:
        """Return the answers to a request about each node, sent together; None: no such node."""
        answers: list[Any] = []
        for first in range(0, len(paths), READS_AT_ONCE):
            self._wait_until_connected(deadline_in(self._deadline_s))
            asked = [
                partial(request, self._root + path or "/")
                for path in paths[first : first + READS_AT_ONCE]
            ]
            for again, sent in [(ask, ask()) for ask in asked]:
                try:
                    answers.append(self._answer(again, sent))
                except NoNodeError:
                    answers.append(None)
        return answers

    def children(self, path: str) -> list[str]:
        try:
            names: list[str] = self._answer(
                lambda: self._client.get_children_async(self._root + path)
            )
        except NoNodeError:
            return []
        return sorted(names)

    def sync(self) -> None:
        self._answer(lambda: self._client.sync_async(self._root + CLOCK_PATH))

    def now_ms(self) -> int:
        # Writing is the only way to see the leader's clock; doing it twice does no harm.
        return int(self._answer(lambda: self._client.set_async(self._root + CLOCK_PATH, b"")).mtime)

    def transact(self, operations: Sequence[Operation]) -> None:
        check_size(operations)
        deadline = deadline_in(self._deadline_s)
        self._wait_until_connected(deadline)
        transaction = self._client.transaction()
        for operation in operations:
            _add(transaction, operation, self._root)
        with self._translated():
            try:
                results = transaction.commit_async().get(timeout=remaining(deadline))
            except _LOST_ANSWER as exc:
                raise UnknownOutcome(f"ZooKeeper at {self._hosts} did not answer a write") from exc
            if self._lost.is_set():  # It may have been sent in a session that kazoo made anew.
                raise self._session_lost()
            _check_results(operations, results)

    def watch(self, path: str, changed: Callable[[], None], *, until_deleted: bool = False) -> None:
        self.check_session()
        over = self._watches.discard if until_deleted else None
        watch = Watch(self._client, self._root + path, changed, over)
        self._watches.add(watch)
        watch.arm()

    @property
    def session_timeout_s(self) -> float:
        """How long ZooKeeper keeps the session without hearing of it: not always as asked for."""
        return self._session_timeout_s

    def _observe_negotiation(self) -> None:
        """Learn the time-out that ZooKeeper grants. kazoo goes by it and tells nobody."""
        connection = self._client._connection
        connect = connection._connect

        def observed(*where: Any) -> Any:
            read_timeout_ms, connect_timeout_ms = connect(*where)
            self._session_timeout_s = read_timeout_ms * 1.5 / 1000  # It reads for two thirds of it.
            return read_timeout_ms, connect_timeout_ms

        connection._connect = observed

    def _hurry_connecting(self) -> None:
        """Let no host that says nothing keep us for as long as the session lasts.

        kazoo would wait that long for a connection, and once more for its first answer. A host that
        is gone answers neither, and a ZooKeeper that is just starting may drop what it is sent.
        """
        longest_s = max(_SHORTEST_CONNECT_S, self._session_timeout_s * _CONNECT_PART)
        connection, handler = self._client._connection, self._client.handler
        create_connection, invoke = handler.create_connection, connection._invoke

        def connect_soon(*arguments: Any, timeout: float, **options: Any) -> Any:
            return create_connection(*arguments, timeout=min(timeout, longest_s), **options)

        def invoke_soon(timeout: float, *arguments: Any, **options: Any) -> Any:
            return invoke(min(timeout, longest_s), *arguments, **options)

        handler.create_connection, connection._invoke = connect_soon, invoke_soon

    @property
    def connected(self) -> bool:
        """Whether the connection is up, as far as is known here: never a reason to write."""
        return bool(self._client.connected) and not self._lost.is_set()

    @property
    def lost(self) -> bool:
        """Whether the session is gone, or closed: nothing works here any more."""
        return self._lost.is_set()

    def close(self) -> None:
        if forks.is_inherited(self._process):
            return
        self._lost.set()
        with self._ending:
            try:
                self._client.stop()
                self._client.close()
            except Exception:
                logger.warning("the connection with %s did not close", self._hosts, exc_info=True)

    def _answer(self, request: Callable[[], Any], sent: Any = None) -> Any:
        """Send a request that may be sent twice, until it is answered or the deadline passes.

        `sent`: what the first sending returned, if that is done already.
        """
        deadline = deadline_in(self._deadline_s)
        while True:
            self._wait_until_connected(deadline)
            with self._translated():
                try:
                    answer = request() if sent is None else sent
                    return answer.get(timeout=remaining(deadline))
                except _LOST_ANSWER as exc:
                    sent = None
                    if time.monotonic() >= deadline:
                        raise self._unavailable() from exc

    def _wait_until_connected(self, deadline: float) -> None:
        self.check_session()
        while not self._client.connected:
            if time.monotonic() >= deadline:
                raise self._unavailable()
            self._lost.wait(0.01)
            self.check_session()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn kazoo's errors into ours; a missing node is for the caller to judge."""
        try:
            yield
        except NoNodeError:
            raise
        except _LOST_SESSION as exc:
            self._lost.set()
            raise self._session_lost() from exc
        except NoAuthError as exc:
            given = "with these credentials" if self._has_credentials else "without credentials"
            raise AccessDenied(
                f"ZooKeeper at {self._hosts} refuses access below {self._root or '/'} {given}; "
                "give the user and the password of the cluster: a client as `credentials`, a "
                f"server and the command line in {CREDENTIALS_VARIABLE}"
            ) from exc
        except KazooException as exc:
            raise TallybookError(f"ZooKeeper at {self._hosts}: {exc!r}") from exc

    def _on_state(self, state: str) -> None:
        """Called on kazoo's own thread: must not wait for anything."""
        if state == KazooState.CONNECTED:
            for watch in list(self._watches):
                watch.arm()
        elif state == KazooState.LOST and not self._lost.is_set():
            logger.warning("the ZooKeeper session with %s is lost", self._hosts)
            self._lost.set()
            # kazoo would open another session, where ours goes on as if nothing had happened.
            threading.Thread(target=self.close, name="zookeeper-close", daemon=True).start()

    def check_session(self) -> None:
        """Raise SessionLost if it is known to be gone; nobody is asked."""
        if forks.is_inherited(self._process):
            raise forks.after_fork(f"its connection with ZooKeeper at {self._hosts}")
        if self._lost.is_set():
            raise self._session_lost()

    def _session_lost(self) -> SessionLost:
        return SessionLost(f"the session with ZooKeeper at {self._hosts} is gone; connect again")

    def _unavailable(self) -> Unavailable:
        return Unavailable(
            f"ZooKeeper at {self._hosts} is away: it did not answer in time; try again"
        )


def _client(
    hosts: str, session_timeout_s: float, credentials: tuple[str, str] | None
) -> KazooClient:
    security: dict[str, Any] = {}
    if credentials is not None:
        user, password = credentials
        security["auth_data"] = [("digest", f"{user}:{password}")]
        security["default_acl"] = [make_digest_acl(user, password, all=True)]
    # kazoo's own back-off grows to an hour: the session would be gone long before it tries again.
    retry = KazooRetry(max_tries=-1, delay=0.1, backoff=1.5, max_delay=0.5)
    return KazooClient(
        hosts=hosts, timeout=session_timeout_s, connection_retry=retry, logger=_quiet(), **security
    )


def _node(answer: Any) -> Node | None:
    if answer is None:
        return None
    data, stat = answer
    return Node(data, stat.version, stat.mtime)


def _lets_anybody_write(entry: Any) -> bool:
    """Whether this entry of an access list is for everybody, and for more than reading."""
    return entry.id.scheme == "world" and bool(entry.perms & _CHANGES)


def _quiet() -> logging.Logger:
    """kazoo reports every reconnect as a warning with a traceback; the states say enough."""
    quiet = logging.getLogger("locks.kazoo")
    quiet.setLevel(logging.ERROR)
    return quiet


def _add(transaction: Any, operation: Operation, root: str) -> None:
    path = root + operation.path
    if isinstance(operation, Create):
        transaction.create(path, operation.data, ephemeral=operation.ephemeral)
    elif isinstance(operation, Write):
        transaction.set_data(path, operation.data, operation.version)
    elif isinstance(operation, Check):
        transaction.check(path, operation.version)
    else:
        transaction.delete(path, operation.version)


def _check_results(operations: Sequence[Operation], results: Sequence[Any]) -> None:
    """kazoo returns the errors of a transaction rather than raising them: one per operation.

    Those before and after the one that failed are told of its consequences only.
    """
    failed = [
        (operation, result)
        for operation, result in zip(operations, results, strict=True)
        if isinstance(result, Exception) and not isinstance(result, _CONSEQUENCES)
    ]
    for operation, result in failed:
        if isinstance(result, _CONDITIONS):
            raise Conflict(operation.path) from result
        raise result
    if any(isinstance(result, Exception) for result in results):
        raise TallybookError(f"ZooKeeper rolled a transaction back without a reason: {results}")
