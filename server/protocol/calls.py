"""What calls have in common, and the calls about a server.

What a call needs is its dataclass, and what comes back is the class that it names as its answer.
`puts.py` has the calls that put, `writers.py` those of writers with a column lock, and `reads.py`
those that read. A put goes as the command of a Flight stream, any other as an action of its name.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from foundation.ids import BucketId
from server.protocol.messages import BUCKETS, FLAG, NUMBER, NUMBERS, TEXT, Message, one_bucket
from server.protocol.wire import Fields

Answer_co = TypeVar("Answer_co", bound=Message, covariant=True)
Result_co = TypeVar("Result_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Call(Message, Generic[Answer_co]):
    """What a client asks of a server. `answer`: the class of what comes back."""

    name: ClassVar[str]
    answer: ClassVar[type[Message]]


@dataclass(frozen=True, kw_only=True)
class TableCall(Call[Answer_co]):
    """A call about a table, as its caller knows it: columns are those of this schema."""

    table_id: Annotated[int, NUMBER.called("table")]
    schema_version: Annotated[int, NUMBER]


@dataclass(frozen=True, kw_only=True)
class BucketsAnswer(Message, Generic[Result_co]):
    """What a server says of each bucket of a call, in the call's order; `session`: the server's."""

    session: Annotated[str, TEXT]
    results: tuple[Result_co, ...]


@dataclass(frozen=True, kw_only=True)
class BucketsCall(TableCall[Answer_co]):
    """A call to buckets of a table; each goes to its leader, so servers get a share of the call."""

    buckets: Annotated[Collection[BucketId], BUCKETS]

    def only(self, buckets: Sequence[BucketId]) -> Self:
        """Return the call to some of its buckets."""
        if isinstance(self.buckets, Mapping):
            return replace(self, buckets={key: self.buckets[key] for key in buckets})
        return replace(self, buckets=tuple(buckets))


@dataclass(frozen=True, kw_only=True)
class Nothing(Message):
    """The answer of a call that says nothing but that it was carried out."""


# --- About a server -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TakeSnapshotsAnswer(BucketsAnswer[int]):
    """The ids of the latest snapshots; NOT_THERE: it is left for the next call."""

    results: Annotated[tuple[int, ...], NUMBERS.called("snapshots")]


@dataclass(frozen=True, kw_only=True)
class TakeSnapshots(BucketsCall[TakeSnapshotsAnswer]):
    """Take snapshots of buckets now; `some`: for about a second, of one bucket at least.

    A server that does not know the field takes all of them, and so does one for a caller that does
    not send it.
    """

    name = "snapshot"
    answer = TakeSnapshotsAnswer
    some: Annotated[bool, FLAG] = False


@dataclass(frozen=True, kw_only=True)
class StatusAnswer(Message):
    """What a server says of itself, for people: what is in it may change."""

    status: Mapping[str, Any]

    def to_fields(self) -> dict[str, Any]:
        return dict(self.status)

    @classmethod
    def from_fields(cls, received: Fields) -> Self:
        return cls(status=received.to_dict())


@dataclass(frozen=True, kw_only=True)
class Status(Call[StatusAnswer]):
    """Ask a server about itself."""

    name = "status"
    answer = StatusAnswer


@dataclass(frozen=True, kw_only=True)
class HandOverAnswer(Message):
    """`refused`: why the bucket stays where it is; None: its leader has given it up."""

    refused: Annotated[str | None, TEXT] = None


@dataclass(frozen=True, kw_only=True)
class HandOver(Call[HandOverAnswer]):
    """Ask a bucket's leader to give it up to the server of a session, which has warmed up.

    Asking twice is fine. Whoever is given it still has to take the leader's node, and to lead.
    """

    name = "hand_over"
    answer = HandOverAnswer
    table_id: Annotated[int, NUMBER.called("table")]
    bucket: Annotated[BucketId, one_bucket("a hand-over").called("buckets")]
    session: Annotated[str, TEXT]


@dataclass(frozen=True, kw_only=True)
class DrainAnswer(Message):
    """How many buckets the server still leads; it ends by itself when that is none."""

    buckets: Annotated[int, NUMBER]


@dataclass(frozen=True, kw_only=True)
class Drain(Call[DrainAnswer]):
    """Tell a server to hand its buckets over and to end. Telling it twice is fine."""

    name = "drain"
    answer = DrainAnswer


@dataclass(frozen=True, kw_only=True)
class Ping(Call[Nothing]):
    """Ask a server whether it answers."""

    name = "ping"
    answer = Nothing
