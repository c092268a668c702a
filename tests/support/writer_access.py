"""How writers of a test's world reach ZooKeeper and the leaders, and what goes wrong on the way."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from foundation.errors import SessionLost, UnknownOutcome
from foundation.ids import BucketId, Token
from locks.coordinator import Coordinator
from locks.store.base import Conflict, Node, Operation
from locks.store.memory import MemoryStore
from merge_engine.bucket.results import BucketResult, UndoResult
from recovery.embedded.access import Leading
from recovery.leader.fenced_writers import Writer
from recovery.leader.led_bucket import LedBucket
from recovery.writer.access import Answers, DebtUndo, Grant, GrantedRows, Terms, Tried
from recovery.writer.parts import PartSizes
from recovery.writer.redo import Promise, PromiseWriter
from tests.support.catalog_access import CatalogAccess
from tests.support.writer_model import Content
from tests.support.writer_table import contents_of

if TYPE_CHECKING:
    from tests.support.writer_world import World


@dataclass(frozen=True)
class Server:
    """A server of this world: a session, and the buckets that it leads or once led."""

    store: MemoryStore
    coordinator: Coordinator
    name: str
    buckets: dict[BucketId, LedBucket] = field(default_factory=dict)


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


class ReaderStore(MemoryStore):
    """A session in which something may happen before each read; somebody notes what was read."""

    def __init__(self, world: "World", begun: Callable[[], None], read: Callable[[str], None]):
        """`begun`: called when the owners are listed. `read`: after the record of one was read."""
        super().__init__(world.shared, world.shared.connect().session)
        self._world = world
        self._begun = begun
        self._read = read

    def children(self, path: str) -> list[str]:
        self._world.step()
        found = super().children(path)
        self._begun()
        return found

    def read(self, path: str) -> Node | None:
        self._world.step()
        found = super().read(path)
        self._read(path.rpartition("/")[2])
        return found


class WorldAccess(CatalogAccess):
    """An access that tells the model of what is applied, and whose calls may be sent again.

    `believes`: the leaders that this client goes on asking, until they refuse it.
    """

    def __init__(self, world: "World") -> None:
        self.world = world
        self.believes: dict[BucketId, Server] = {}
        self._fenced_by_zombies = False
        self._putting: tuple[Grant, Content] | None = None
        sizes = PartSizes(rows=1 if world.small_parts else 1_000)
        undo_s = 0.0 if world.small_undos else 60.0
        super().__init__(world.connect, "t", self, deadline_s=0.0, sizes=sizes, undo_s=undo_s)

    def leading(self, keys: Sequence[BucketId]) -> Iterator[Leading]:
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

    def _server_of(self, key: BucketId) -> Server:
        return self.believes.get(key) or self.world.leader_of(key)

    def _ask(self, keys: Sequence[BucketId], call: Callable[..., Any]) -> Answers[Any]:
        def told(leading: Leading) -> Mapping[BucketId, Any]:
            try:
                results: Mapping[BucketId, Any] = call(leading)
            except BaseException:
                for key in leading.buckets:
                    self.believes.pop(key, None)
                raise
            self._tell(results)
            return results

        answers = super()._ask(keys, told)
        self.world.step()
        return answers

    def _tell(self, results: Mapping[BucketId, Any]) -> None:
        if self._putting is None:
            return
        grant, content = self._putting
        for key, result in results.items():
            if isinstance(result, BucketResult):
                own = {at: c for at, c in content.items() if self.world.bucket_of(at) == key}
                token = Token(grant.writer.epoch, grant.token.batch)
                self.world.model.put(grant.owner, token, key, own)

    def _keep(self, name: str, call: Callable[[], object]) -> None:
        """Send a call once more, at any later time."""
        if self.world.keep_calls:
            self.world.late.append((name, call))

    def fence(self, writer: Writer, columns: Any, keys: Sequence[BucketId]) -> Answers[int]:
        self._keep("fence", lambda: self.fence(writer, columns, keys))
        if self._fenced_by_zombies:  # Once is bad luck; then it looks who leads.
            self.believes.clear()
        self._fenced_by_zombies = bool(self.believes)
        return super().fence(writer, columns, keys)

    def undo(self, wanted: DebtUndo) -> Answers[UndoResult]:
        old = replace(wanted, terms=dict(wanted.terms))
        self._keep("undo", lambda: self.undo(old))
        return super().undo(wanted)

    def end_recovery(self, writer: Writer, terms: Terms) -> Answers[int]:
        old = dict(terms)
        self._keep("end_recovery", lambda: self.end_recovery(writer, old))
        return super().end_recovery(writer, terms)

    def put(self, granted: GrantedRows) -> Answers[BucketResult]:
        old = replace(granted, grant=_as_it_is(granted.grant))
        self._keep("put", lambda: self.put(old))
        with self._telling(granted.grant, contents_of(granted.rows, self.world.partitioned)):
            return super().put(granted)

    def try_put(self, granted: GrantedRows, promise: PromiseWriter) -> Tried:
        grant = granted.grant
        content = contents_of(granted.rows, self.world.partitioned)
        self.world.model.promised[grant.owner, grant.token] = content
        tried = super().try_put(granted, promise)
        return _Tried(self, _as_it_is(grant), content, tried)

    def keep(self, granted: GrantedRows, promise: Promise) -> Answers[BucketResult]:
        grant = granted.grant
        old = replace(granted, grant=_as_it_is(grant))
        self._keep("put", lambda: self.keep(old, promise))
        with self._telling(grant, self.world.model.promised[grant.owner, grant.token]):
            return super().keep(granted, promise)

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


def _as_it_is(grant: Grant) -> Grant:
    """Return the grant as it is now: the writer's terms change."""
    return replace(grant, terms=dict(grant.terms))


@dataclass(frozen=True)
class _Tried:
    """A batch of this world that was tried; its put may be sent again, too."""

    access: WorldAccess
    grant: Grant
    content: Content
    tried: Tried

    def put(self) -> Answers[BucketResult]:
        self.access._keep("put", self.put)
        with self.access._telling(self.grant, self.content):
            return self.tried.put()

    def close(self) -> None:
        self.tried.close()
