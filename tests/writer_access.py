"""How writers of a test's world reach ZooKeeper and the leaders, and what goes wrong on the way."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from locks import BucketKey, Coordinator, MemoryStore, SessionLost, UnknownOutcome
from locks.store import Conflict, Operation
from merge_engine import PutResult, Token, UndoRange, UndoResult
from recovery.access import Answers, Grant, Terms, Tried
from recovery.embedded import EmbeddedAccess, Leading
from recovery.guard import Writer
from recovery.led_bucket import LedBucket
from recovery.parts import PartSizes
from recovery.redo import Promise, PromiseWriter
from recovery.rows import Rows
from tests.writer_model import Content
from tests.writer_table import contents_of

if TYPE_CHECKING:
    from tests.writer_world import World


@dataclass(frozen=True)
class Server:
    """A server of this world: a session, and the buckets that it leads or once led."""

    store: MemoryStore
    coordinator: Coordinator
    name: str
    buckets: dict[BucketKey, LedBucket] = field(default_factory=dict)


class WorldStore(MemoryStore):
    """A session whose transactions are observed and, unless it is quiet, go wrong when told to."""

    def __init__(self, world: "World", quiet: bool) -> None:
        super().__init__(world.shared, world.shared.connect().session)
        self._world = world
        self._quiet = quiet
        self._late: Sequence[Operation] = ()

    def transact(self, operations: Sequence[Operation]) -> None:
        self._settle()
        losses = self._world.losses
        if self._quiet or not losses:
            self._observed(operations)
            return
        loss = losses.popleft()
        if loss == "late":
            self._late = operations
        elif loss in ("answer", "session"):
            self._unanswered(operations)
        if loss == "session":
            self._world.shared.expire(self.session)
            raise SessionLost("the session is gone")
        raise UnknownOutcome("no answer")

    def sync(self) -> None:
        self._settle()
        super().sync()

    def _settle(self) -> None:
        late, self._late = self._late, ()
        if late:
            self._unanswered(late)

    def _observed(self, operations: Sequence[Operation]) -> None:
        self._world.transact(partial(super().transact, operations))

    def _unanswered(self, operations: Sequence[Operation]) -> None:
        with suppress(Conflict):
            self._observed(operations)


class WorldAccess(EmbeddedAccess):
    """An access that tells the model of what is applied, and whose calls may be sent again.

    `believes`: the leaders that this client goes on asking, until they refuse it.
    """

    def __init__(self, world: "World") -> None:
        self.world = world
        self.believes: dict[BucketKey, Server] = {}
        self._fenced_by_zombies = False
        self._putting: tuple[Grant, Content] | None = None
        sizes = PartSizes(rows=1 if world.small_parts else 1_000)
        undo_s = 0.0 if world.small_undos else 60.0
        super().__init__(world.connect, "t", self, deadline_s=0.0, sizes=sizes, undo_s=undo_s)

    def leading(self, keys: Sequence[BucketKey]) -> Iterator[Leading]:
        """Yield server by server; before each of them, something may happen."""
        rest = list(keys)
        while rest:
            self.world.step()
            server = self._server_of(rest[0])
            own = [key for key in rest if self._server_of(key) is server]
            is_zombie = self.world.leads.get(own[0]) is not server
            yield Leading(
                session=server.name,
                # The worst of zombies: it has asked ZooKeeper just before it was cut off.
                coordinator=self.world.coordinator if is_zombie else server.coordinator,
                buckets={key: server.buckets[key] for key in own},
            )
            rest = [key for key in rest if key not in own]

    def _server_of(self, key: BucketKey) -> Server:
        return self.believes.get(key) or self.world.leader_of(key)

    def _ask(self, keys: Sequence[BucketKey], call: Callable[..., Any]) -> Answers[Any]:
        def told(leading: Leading) -> Mapping[BucketKey, Any]:
            try:
                results: Mapping[BucketKey, Any] = call(leading)
            except BaseException:
                for key in leading.buckets:
                    self.believes.pop(key, None)
                raise
            self._tell(results)
            return results

        answers = super()._ask(keys, told)
        self.world.step()
        return answers

    def _tell(self, results: Mapping[BucketKey, Any]) -> None:
        if self._putting is None:
            return
        grant, content = self._putting
        for key, result in results.items():
            if isinstance(result, PutResult):
                own = {at: c for at, c in content.items() if self.world.bucket_of(at) == key}
                token = Token(grant.writer.epoch, grant.token.batch)
                self.world.model.put(grant.owner, token, key, own)

    def _keep(self, name: str, call: Callable[[], object]) -> None:
        """Send a call once more, at any later time."""
        if self.world.keep_calls:
            self.world.late.append((name, call))

    def fence(self, writer: Writer, columns: Any, keys: Sequence[BucketKey]) -> Answers[int]:
        self._keep("fence", lambda: self.fence(writer, columns, keys))
        if self._fenced_by_zombies:  # Once is bad luck; then it looks who leads.
            self.believes.clear()
        self._fenced_by_zombies = bool(self.believes)
        return super().fence(writer, columns, keys)

    def undo(
        self,
        writer: Writer,
        terms: Terms,
        debtor: str,
        columns: Any,
        ranges: Mapping[BucketKey, UndoRange],
    ) -> Answers[UndoResult]:
        old = dict(terms)
        self._keep("undo", lambda: self.undo(writer, old, debtor, columns, ranges))
        return super().undo(writer, terms, debtor, columns, ranges)

    def end_recovery(self, writer: Writer, terms: Terms) -> Answers[int]:
        old = dict(terms)
        self._keep("end_recovery", lambda: self.end_recovery(writer, old))
        return super().end_recovery(writer, terms)

    def put(self, grant: Grant, rows: Rows) -> Answers[PutResult]:
        old = replace(grant, terms=dict(grant.terms))
        self._keep("put", lambda: self.put(old, rows))
        with self._telling(grant, contents_of(rows, self.world.partitioned)):
            return super().put(grant, rows)

    def try_put(self, grant: Grant, rows: Rows, promise: PromiseWriter) -> Tried:
        content = contents_of(rows, self.world.partitioned)
        self.world.model.promised[grant.owner, grant.token] = content
        tried = super().try_put(grant, rows, promise)
        return _Tried(self, replace(grant, terms=dict(grant.terms)), content, tried)

    def keep(self, grant: Grant, promise: Promise, rows: Rows) -> Answers[PutResult]:
        old = replace(grant, terms=dict(grant.terms))
        self._keep("put", lambda: self.keep(old, promise, rows))
        with self._telling(grant, self.world.model.promised[grant.owner, grant.token]):
            return super().keep(grant, promise, rows)

    @contextmanager
    def _telling(self, grant: Grant, content: Content) -> Iterator[None]:
        outer, self._putting = self._putting, (grant, content)
        try:
            yield
        finally:
            self._putting = outer

    def seal(self, writer: Writer, terms: Terms, batch: int) -> Answers[int]:
        old = dict(terms)
        self._keep("seal", lambda: self.seal(writer, old, batch))
        return super().seal(writer, terms, batch)

    def reconnect(self) -> "WorldAccess":
        access = WorldAccess(self.world)
        self.world.accesses.append(access)
        return access


@dataclass(frozen=True)
class _Tried:
    """A batch of this world that was tried; its put may be sent again, too."""

    access: WorldAccess
    grant: Grant
    content: Content
    tried: Tried

    def put(self) -> Answers[PutResult]:
        self.access._keep("put", self.put)
        with self.access._telling(self.grant, self.content):
            return self.tried.put()

    def close(self) -> None:
        self.tried.close()
