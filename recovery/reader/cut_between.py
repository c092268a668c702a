"""A cut between two others that is no more than so many rows away from the first of them.

Batches stay whole, and each owner's are in their order. Where an owner has had columns of another,
all that the first wrote comes before what the second did: epochs tell who came first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import groupby
from typing import NamedTuple

from foundation.ids import BucketId, Token
from locks.encoding.offsets import Offsets
from merge_engine.bucket.segment import SegmentHeader
from merge_engine.bucket.undone_work import undone_columns, undone_of
from recovery.reader.cut import LAST_BATCH, Cut, OwnerCut

# So many batches of a bucket are told one by one; of each epoch, those that follow are one piece.
MOST_PIECES = 2_000


class Piece(NamedTuple):
    """What a batch has changed in a bucket: so many keys, in these columns, up to this offset.

    `token`: None if it was put without a lock. The batch `LAST_BATCH` stands for all of its epoch
    that follow: how many there are is not told, but that there are some.
    """

    owner: str
    token: Token | None
    keys: int
    time_ms: int
    columns: frozenset[int]
    end_offset: int

    def with_more(self, other: "Piece") -> "Piece":
        """Return it together with one that comes later in the log."""
        return self._replace(
            keys=self.keys + other.keys,
            columns=self.columns | other.columns,
            end_offset=other.end_offset,
        )


def pieces_of(headers: Sequence[SegmentHeader], most: int = MOST_PIECES) -> tuple[Piece, ...]:
    """Return what the changes between two cuts are made of; what was undone is left out."""
    undone = undone_columns(headers)
    pieces: dict[object, Piece] = {}
    for header in headers:
        columns = frozenset(header.column_ids) - undone_of(undone, header)
        if not columns:
            continue
        token, keys, end = header.lock_token, header.rows, header.end_offset
        name: object = header.base_offset if token is None else token
        if len(pieces) >= most and name not in pieces:
            # Epochs are those of locks; whoever has none goes by the order of the log.
            epoch = -1 if token is None else token.epoch
            token = name = Token(epoch, LAST_BATCH)
        piece = Piece(header.owner, token, keys, header.timestamp_ms, columns, end)
        pieces[name] = pieces[name].with_more(piece) if name in pieces else piece
    return tuple(pieces.values())


def cut_between(
    since: Cut, until: Cut, found: Mapping[BucketId, Sequence[Piece]], most_keys: int
) -> Cut:
    """Return the later cut, or one before it with at most so many changed keys since the first.

    One batch at least is in it, however large.
    """
    pieces = [piece for of_bucket in found.values() for piece in of_bucket]
    if sum(piece.keys for piece in pieces) <= most_keys:
        return until
    if until.epoch is not None and any(piece.token is None for piece in pieces):
        # Earlier releases did not write down under which lock: their batches cannot be told apart.
        return until
    lanes = _puts(found) if until.epoch is None else _batches(found)
    chosen = _choose(lanes, most_keys)
    if not chosen or len(chosen) == sum(map(len, lanes)):
        return until
    time_ms = max(since.time_ms, *(step.time_ms for step in chosen))
    if until.epoch is None:
        ends = {bucket: end for step in chosen for bucket, end in step.ends.items()}
        return replace(until, ends=Offsets({**(since.ends or {}), **ends}), time_ms=time_ms)
    owners = dict(since.owners)
    for step in chosen:
        before = owners.get(step.owner, OwnerCut(batch=-1))
        # From the start of the logs on, if that is where the first of the cuts is.
        start: Mapping[BucketId, int] = (since.epoch is None and since.ends) or {}
        offsets = start if before.offsets is None else before.offsets
        owners[step.owner] = OwnerCut(
            batch=step.token.batch, offsets=Offsets({**offsets, **step.ends}), through=step.token
        )
    return replace(since, owners=owners, time_ms=time_ms)


@dataclass
class _Step:
    """A batch, in all buckets that it has changed; or a put, in one. `ends`: where it ends."""

    owner: str
    token: Token
    time_ms: int
    keys: int = 0
    columns: frozenset[int] = frozenset()
    ends: dict[BucketId, int] = field(default_factory=dict)

    def add(self, bucket: BucketId, piece: Piece) -> None:
        self.time_ms = min(self.time_ms, piece.time_ms)
        self.keys += piece.keys
        self.columns |= piece.columns
        self.ends[bucket] = piece.end_offset


_Lane = Sequence[_Step]
"""The batches of an epoch, or the puts of a bucket, in their order."""


def _batches(found: Mapping[BucketId, Sequence[Piece]]) -> list[_Lane]:
    steps: dict[Token, _Step] = {}
    for bucket, pieces in found.items():
        for piece in pieces:
            assert piece.token is not None
            new = _Step(piece.owner, piece.token, piece.time_ms)
            steps.setdefault(piece.token, new).add(bucket, piece)
    tokens = sorted(steps)
    return [
        [steps[token] for token in of_epoch]
        for _, of_epoch in groupby(tokens, key=lambda token: token.epoch)
    ]


def _puts(found: Mapping[BucketId, Sequence[Piece]]) -> list[_Lane]:
    lanes: list[_Lane] = []
    for number, (bucket, pieces) in enumerate(found.items()):
        # Buckets have nothing to do with each other: none waits for another.
        steps = []
        for at, one in enumerate(pieces):
            steps.append(_Step(str(bucket), one.token or Token(number, at), one.time_ms))
            steps[-1].add(bucket, one._replace(columns=frozenset()))
        lanes += [steps] if steps else []
    return lanes


def _choose(lanes: Sequence[_Lane], most_keys: int) -> list[_Step]:
    """Return the batches to take, by the time when they were written, as far as they may come.

    Of a lane that has more than was told, the rest is not taken, and nothing that waits for it.
    """
    waits = _waits(lanes)
    following = [(lane[0].time_ms, at, 0) for at, lane in enumerate(lanes) if not waits[at]]
    heapify(following)
    chosen: list[_Step] = []
    keys = 0
    while following:
        _, at, number = heappop(following)
        step = lanes[at][number]
        if step.token.batch == LAST_BATCH:
            continue
        if chosen and keys + step.keys > most_keys:
            break
        chosen.append(step)
        keys += step.keys
        if number + 1 < len(lanes[at]):
            heappush(following, (lanes[at][number + 1].time_ms, at, number + 1))
            continue
        for other, blockers in enumerate(waits):
            if at in blockers:
                blockers.remove(at)
                if not blockers:
                    heappush(following, (lanes[other][0].time_ms, other, 0))
    return chosen


def _waits(lanes: Sequence[_Lane]) -> list[set[int]]:
    """Return, for each lane, those before it that must be at their end before it begins.

    They have its owner, or a column of it. The last of each is enough: it waits for others itself.
    """
    last: dict[str | int, int] = {}
    waits = []
    for at, lane in enumerate(lanes):
        names: set[str | int] = {
            lane[0].owner,
            *(column for step in lane for column in step.columns),
        }
        waits.append({last[name] for name in names if name in last})
        last.update(dict.fromkeys(names, at))
    return waits
