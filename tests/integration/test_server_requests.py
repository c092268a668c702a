"""Requests that no client of ours sends: refused and logged, nothing written, the server lives."""

import json
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import flight

from foundation.errors import (
    BadRequest,
    BatchTooLarge,
    InvalidInput,
    InvalidOwner,
    InvalidValue,
    NotLeader,
    OffsetOutOfRange,
    SchemaError,
    ServerFailed,
    TallybookError,
    UnknownColumn,
    UnknownTable,
    WrongType,
)
from foundation.ids import BucketId
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.undo import UndoRange
from merge_engine.merging.hashing import bucket_of
from recovery.leader.fenced_writers import Writer
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.protocol import wire
from server.protocol.calls import BucketsCall
from server.protocol.puts import PutAnswer
from server.protocol.reads import LogEnds, write_shares
from server.protocol.writers import EndRecovery, Fence, Seal, Undo, UndoStep
from server.tablet.limits import Limits
from server.tablet.tablet_server import TabletServer
from tests.support.raw_flight import (
    FIRST,
    KEYS,
    ROWS,
    SCHEMA,
    JsonLog,
    Stranger,
    client_of,
    closing,
    json_log,
    running,
)
from tests.support.unsound import NO_TEXT, damaged, texts
from tests.support.zookeeper_server import chroot, wait_until, zookeeper_server

FEW = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
KEY = list(range(40))
SUM = SCHEMA.value_columns[0].id
# ZooKeeper's client uses `random` in its threads, and Hypothesis takes it for ours.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")


def _of_bucket(number: int) -> list[int]:
    numbers = bucket_of([pa.array(KEY, pa.int64())], 2)
    return [key for key, at in zip(KEY, numbers, strict=True) if at == number]


MINE, OTHERS = _of_bucket(0), _of_bucket(1)


@dataclass(frozen=True)
class Scene:
    """A server with a table of two buckets, its client, its log, and somebody else."""

    server: TabletServer
    cluster: Cluster
    table: RemoteTable
    stranger: Stranger
    log: JsonLog

    def state(self) -> Any:
        """Return everything that a request could change."""
        return self.table.end_offsets(), self.table.lookup({"k": KEY}).to_pylist()

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """Check that what is sent in this block is refused and logged, and changes nothing."""
        before, seen = self.state(), len(self.log.lines)
        yield
        assert self.stranger.action("ping", b"") is not None
        assert self.state() == before
        new = self.log.lines[seen:]
        assert [line for line in new if line["level"] in ("error", "critical")] == []
        refusals = [line["message"] for line in new if line["message"].startswith("refused a")]
        assert any("127.0.0.1:" in message for message in refusals), new
        assert all(len(message) < 1_100 for message in refusals)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    directory = tmp_path_factory.mktemp("requests")
    with ExitStack() as stack:
        log = stack.enter_context(json_log())
        address = chroot(stack.enter_context(zookeeper_server(directory)))
        options = BucketOptions(put_max_rows=100, put_max_bytes=100_000)
        limits = Limits(lookup_max_keys=100)
        server = stack.enter_context(
            running(address, directory / "server", options=options, limits=limits)
        )
        cluster = stack.enter_context(client_of(address))
        table = cluster.create_table("t", SCHEMA, buckets=2, column_locks=False)
        table.put({"k": KEY, "a": KEY, "note": ["é"] * len(KEY)})
        stranger = Stranger(server.address, table)
        stack.callback(stranger.close)
        yield Scene(server, cluster, table, stranger, log)


def rows(*keys: int) -> pa.RecordBatch:
    """Return rows of these keys."""
    return pa.record_batch([pa.array(keys, pa.int64()), pa.array(keys, pa.int64())], schema=ROWS)


GOOD = rows(*MINE[:3])


def test_what_the_bad_requests_are_made_of_is_good(scene: Scene) -> None:
    before = scene.table.end_offsets()
    stranger = scene.stranger
    answer = stranger.put(wire.encode(stranger.put_fields()), [(GOOD, b"0"), closing(GOOD)])
    assert len(PutAnswer.from_fields(answer).results) == 1
    assert scene.table.end_offsets() != before
    [found] = wire.read_answer(stranger.look_up(MINE), pa.schema([("a", pa.int64())]))
    assert found.num_rows == len(MINE)
    assert stranger.get(wire.encode(stranger.changelog_fields())).num_rows > 0
    command = wire.encode(stranger.exchange_fields())
    for found in stranger.exchange(command, [KEYS_OF_MINE, KEYS_OF_MINE]):
        assert found.column("k").to_pylist() == MINE[:1]


# --- Puts -------------------------------------------------------------------------------------

Put = tuple[dict[str, Any], list[tuple[pa.RecordBatch | None, bytes | None]], type[Exception], str]
MANY, WIDE = rows(*(MINE * 10)), pa.record_batch({"k": MINE[:1], "note": ["x" * 200_000]})
TWICE = {"buckets": [[0, 0, -1], [0, 0, -1]]}

BAD_PUTS: dict[str, Put] = {
    "no closing message": ({}, [(GOOD, b"0")], BadRequest, "cut short after 3 rows"),
    "nothing at all": ({}, [], BadRequest, "cut short after 0 rows"),
    "fewer rows": ({}, [(GOOD, b"0"), closing(GOOD, GOOD)], BadRequest, "of which 3 arrived"),
    "other rows": ({}, [(GOOD, b"0"), closing(rows(7, 8, 9))], BadRequest, "arrived damaged"),
    "a closing message of garbage": ({}, [(GOOD, b"0"), (None, b"\xff")], BadRequest, "not JSON"),
    "an empty closing message": ({}, [(GOOD, b"0"), (None, b"")], BadRequest, "cut short"),
    "a closing message without a checksum": (
        {},
        [(GOOD, b"0"), (None, wire.encode({"rows": 3}))],
        BadRequest,
        "without a text as `checksum`",
    ),
    "rows behind the closing message": (
        {},
        [(GOOD, b"0"), closing(GOOD), (GOOD, b"0")],
        BadRequest,
        "goes on after its closing message",
    ),
    "two closing messages": (
        {},
        [(GOOD, b"0"), closing(GOOD), closing(GOOD)],
        BadRequest,
        "goes on after",
    ),
    "a bucket index too high": ({}, [(GOOD, b"1"), closing(GOOD)], BadRequest, "bucket 1 of 1"),
    "a bucket index below 0": ({}, [(GOOD, b"-1"), closing(GOOD)], BadRequest, "bucket -1 of 1"),
    "a bucket index of garbage": ({}, [(GOOD, b"\xff"), closing(GOOD)], BadRequest, "does not say"),
    "an endless bucket index": (
        {},
        [(GOOD, b"9" * 9_999), closing(GOOD)],
        BadRequest,
        "does not say",
    ),
    "no bucket index": ({}, [(GOOD, None), closing(GOOD)], BadRequest, "does not say"),
    "rows of another bucket": (
        {},
        [(rows(MINE[0], OTHERS[0]), b"0"), closing(rows(MINE[0], OTHERS[0]))],
        BadRequest,
        "rows of other buckets",
    ),
    "one bucket twice": (TWICE, [(GOOD, b"0"), (GOOD, b"1")], BadRequest, "names a bucket twice"),
    "no buckets": ({"buckets": []}, [(GOOD, b"0"), closing(GOOD)], BadRequest, "bucket 0 of 0"),
    "a bucket number too high": (
        {"buckets": [[0, 2, -1]]},
        [],
        BadRequest,
        "0/2 of table 1 is none of",
    ),
    "a negative bucket number": (
        {"buckets": [[0, -1, -1]]},
        [],
        BadRequest,
        "0/-1 of table 1 is none of",
    ),
    "a negative partition": (
        {"buckets": [[-1, 0, -1]]},
        [],
        BadRequest,
        "-1/0 of table 1 is none of",
    ),
    "an unknown partition": (
        {"buckets": [[9, 0, -1]]},
        [(GOOD, b"0"), closing(GOOD)],
        NotLeader,
        "does not lead",
    ),
    "an unknown table": ({"table": 99}, [], NotLeader, "no table with id 99"),
    "a table without end": ({"table": 10**400}, [], BadRequest, "`table` is no number of 64 bits"),
    "buckets without end": ({"buckets": [[0, 0, 1 << 63]]}, [], BadRequest, "whole numbers"),
    "another term": (
        {"buckets": [[0, 0, 77]]},
        [(GOOD, b"0"), closing(GOOD)],
        NotLeader,
        "the call is for term 77",
    ),
    "an unknown schema": (
        {"schema_version": 0},
        [(GOOD, b"0"), closing(GOOD)],
        BadRequest,
        "no schema version 0",
    ),
    "an unknown mode": ({"mode": 7}, [(GOOD, b"0"), closing(GOOD)], BadRequest, "agg mode 7"),
    "a mode that is true": ({"mode": True}, [(GOOD, b"0"), closing(GOOD)], BadRequest, "`mode`"),
    "a trial that is a number": (
        {"try_only": 1},
        [(GOOD, b"0"), closing(GOOD)],
        BadRequest,
        "`try_only`",
    ),
    "an owner without end": (
        {"owner": "o" * 5_000},
        [(GOOD, b"0"), closing(GOOD)],
        BadRequest,
        "`owner` is longer than",
    ),
    "half a character": (
        {"owner": "\ud800"},
        [(GOOD, b"0"), closing(GOOD)],
        BadRequest,
        "no Unicode text",
    ),
    "a token of three": (
        {"token": [1, 2, 3]},
        [(GOOD, b"0"), closing(GOOD)],
        BadRequest,
        "an epoch and a batch",
    ),
    "a token of texts": ({"token": ["1"]}, [(GOOD, b"0"), closing(GOOD)], BadRequest, "`token`"),
    "an unknown column": (
        {"columns": ["nope"]},
        [(GOOD, b"0"), closing(GOOD)],
        UnknownColumn,
        "nope",
    ),
    "a column name without end": (
        {"columns": ["é" * 999]},
        [(GOOD, b"0"), closing(GOOD)],
        UnknownColumn,
        " ... ",
    ),
    "too many rows": ({}, [(MANY, b"0"), closing(MANY)], BatchTooLarge, "put_max_rows"),
    "too many bytes": ({}, [(WIDE, b"0"), closing(WIDE)], BatchTooLarge, "put_max_bytes"),
}


def test_a_put_that_a_bucket_cannot_take_yet_is_refused_before_its_rows_are_read(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent again and again until all of its buckets are open, which may be very many."""
    read: list[Any] = []
    monkeypatch.setattr("server.tablet.service.read_update", lambda *rows: read.append(rows))
    fields = scene.stranger.put_fields(buckets=[[0, 0, -1], [9, 0, -1]])
    with scene.unharmed(), pytest.raises(NotLeader, match="does not lead"):
        scene.stranger.put(wire.encode(fields), [(GOOD, b"0"), closing(GOOD)])
    assert read == []


@pytest.mark.parametrize("name", BAD_PUTS)
def test_a_bad_put_is_refused(scene: Scene, name: str) -> None:
    changes, messages, kind, words = BAD_PUTS[name]
    schema = next((batch.schema for batch, _ in messages if batch is not None), ROWS)
    command = wire.encode(scene.stranger.put_fields(**changes))
    with scene.unharmed(), pytest.raises(kind, match=words):
        scene.stranger.put(command, messages, schema)


DAMAGED: dict[str, tuple[pa.Array, type[InvalidInput], str]] = {
    "offsets beyond the data": (damaged(0, 1 << 30, 6), InvalidInput, "'note' is damaged"),
    "offsets that fall": (damaged(0, 5, 1), InvalidInput, "'note' is damaged"),
    "offsets below 0": (damaged(0, -(1 << 30), 6), InvalidInput, "'note' is damaged"),
    "bytes that are no text": (
        texts([b"abc", NO_TEXT]),
        InvalidValue,
        rf"column 'note', key k={MINE[1]}: text that is not UTF-8: b'.xff",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_put_of_damaged_batches_is_refused(scene: Scene, name: str) -> None:
    notes, kind, words = DAMAGED[name]
    batch = pa.record_batch([pa.array(MINE[:2]), notes], names=["k", "note"])
    command = wire.encode(scene.stranger.put_fields())
    with scene.unharmed(), pytest.raises(kind, match=words):
        scene.stranger.put(command, [(batch, b"0"), closing(batch)], batch.schema)


def test_a_put_of_dictionaries_is_refused(scene: Scene) -> None:
    notes = pa.array(["x", "y"]).dictionary_encode()
    batch = pa.record_batch([pa.array(MINE[:2]), notes], names=["k", "note"])
    command = wire.encode(scene.stranger.put_fields())
    with scene.unharmed(), pytest.raises(BadRequest, match="dictionaries; send their values"):
        scene.stranger.put(command, [(batch, b"0")], batch.schema)


@pytest.mark.parametrize(
    "array",
    [
        pa.nulls(10_000_000),
        pa.RunEndEncodedArray.from_arrays(pa.array([10_000_000]), pa.array([1])),
    ],
    ids=["nulls", "runs"],
)
def test_a_put_of_rows_that_take_no_bytes_is_refused(scene: Scene, array: pa.Array) -> None:
    batch = pa.record_batch([array], names=["k"])
    command = wire.encode(scene.stranger.put_fields())
    with scene.unharmed(), pytest.raises(BatchTooLarge, match="put_max_rows"):
        scene.stranger.put(command, [(batch, b"0"), closing(batch)], batch.schema)


def test_columns_that_the_table_does_not_have_or_of_other_types_are_refused(scene: Scene) -> None:
    for column, kind in (({"k": ["x"]}, WrongType), ({"k": [1], "x" * 20_000: [1]}, UnknownColumn)):
        batch = pa.record_batch(column)
        command = wire.encode(scene.stranger.put_fields())
        with scene.unharmed(), pytest.raises(kind):
            scene.stranger.put(command, [(batch, b"0"), closing(batch)], batch.schema)


# --- Everything else ----------------------------------------------------------------------------

Call = Callable[[Stranger], object]


def _keys(*keys: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(keys, pa.int64())], schema=KEYS)


def _changelog(**changes: Any) -> Call:
    return lambda to: to.get(wire.encode(to.changelog_fields(**changes)))


def _lying(length: int) -> Call:
    """Return a look-up whose header says that it is this long."""
    return lambda to: to.action(
        "lookup", struct.pack("<I", length) + to.lookup_body(_keys(1)).to_pybytes()[4:]
    )


MY_SHARE = write_shares([(BucketId(0, 0), 1)])
KEYS_OF_MINE = (_keys(MINE[0]), MY_SHARE)


def _exchange(**changes: Any) -> Call:
    return lambda to: to.exchange(wire.encode(to.exchange_fields(**changes)), [KEYS_OF_MINE])


def _message(batch: pa.RecordBatch | None, shares: bytes) -> Call:
    schema = KEYS if batch is None else batch.schema
    return lambda to: to.exchange(wire.encode(to.exchange_fields()), [(batch, shares)], schema)


BAD_CALLS: dict[str, tuple[Call, type[Exception], str]] = {
    "an unknown action": (lambda to: to.action("drop", b""), BadRequest, "no action 'drop'"),
    "an action without end": (lambda to: to.action("x" * 99_999, b""), BadRequest, "no action"),
    "an action with NUL": (lambda to: to.action("a\0b", b""), BadRequest, "no action"),
    "no frame": (lambda to: to.action("lookup", b"abc"), BadRequest, "cut short"),
    "a header beyond the end": (_lying(0xFFFFFFFF), BadRequest, "whose header alone has"),
    "a header too short": (_lying(5), BadRequest, "not JSON"),
    "a header of nothing": (_lying(0), BadRequest, "not JSON"),
    "an empty body": (lambda to: to.action("fence", b""), BadRequest, "not JSON"),
    "too long a body": (
        lambda to: to.action("ends", b" " * (wire.LONGEST_REQUEST + 1)),
        BadRequest,
        "the limit is 8,388,608",
    ),
    "nested lists": (lambda to: to.action("ends", b"[" * 1_000_000), BadRequest, "not JSON"),
    "nested objects": (lambda to: to.action("ends", b'{"a":' * 500_000), BadRequest, "not JSON"),
    "a number without end": (
        lambda to: to.action("ends", b'{"format":1,"table":' + b"9" * 9_999 + b"}"),
        BadRequest,
        "not JSON",
    ),
    "another format": (lambda to: to.action("ends", b'{"format":2}'), BadRequest, "reads 1"),
    "a list": (lambda to: to.action("ends", b"[1]"), BadRequest, "no JSON object"),
    "no table": (lambda to: to.action("ends", b'{"format":1}'), BadRequest, "number as `table`"),
    "an unknown table": (lambda to: to.look_up([1], table=99), NotLeader, "id 99"),
    "a newer schema of no table": (
        lambda to: to.look_up([1], table=99, schema_version=9),
        NotLeader,
        "id 99",
    ),
    "a schema to come": (lambda to: to.look_up([1], schema_version=9), BadRequest, "version 9"),
    "keys of no bucket": (
        lambda to: to.action("lookup", to.lookup_body(_keys(1), _keys(2))),
        BadRequest,
        "in 1 buckets with keys for 2",
    ),
    "too many keys": (lambda to: to.look_up(range(101)), BatchTooLarge, "--lookup-max-keys"),
    "columns that are no numbers": (lambda to: to.look_up([1], columns=["a"]), BadRequest, "`col"),
    "an unknown column": (lambda to: to.look_up([1], columns=[99]), UnknownColumn, "id 99"),
    "states of no column": (lambda to: to.look_up([1], states=[99]), UnknownColumn, "id 99"),
    "states of a key": (lambda to: to.look_up([1], states=[1]), SchemaError, "has no state"),
    "states that are no numbers": (lambda to: to.look_up([1], states=["a"]), BadRequest, "`sta"),
    "an unknown isolation": (lambda to: to.look_up([1], isolation="x"), BadRequest, "called 'x'"),
    "a bucket too high": (lambda to: to.look_up([1], buckets=[[0, 2]]), BadRequest, "is none of"),
    "a bucket of three": (lambda to: to.look_up([1], buckets=[[0, 0, 0]]), BadRequest, "2 whole"),
    "buckets that are one": (lambda to: to.look_up([1], buckets=0), BadRequest, "a list as"),
    "an exchange of nothing": (lambda to: to.exchange(b"", [KEYS_OF_MINE]), BadRequest, "not JSON"),
    "another exchange": (_exchange(call="dance"), BadRequest, "no exchange 'dance'"),
    "an exchange of a changelog": (
        lambda to: to.exchange(wire.encode(to.changelog_fields()), [KEYS_OF_MINE]),
        BadRequest,
        "no exchange 'changelog'",
    ),
    "an exchange of no table": (_exchange(table=99), NotLeader, "id 99"),
    "an exchange of no column": (_exchange(columns=[99]), UnknownColumn, "id 99"),
    "an exchange without keys": (_message(None, MY_SHARE), BadRequest, "without keys"),
    "an exchange without buckets": (_message(_keys(1), b""), BadRequest, "in 0 bytes"),
    "an exchange that does not add up": (
        _message(_keys(1, 2), write_shares([(BucketId(0, 0), 3)])),
        BadRequest,
        "do not add up",
    ),
    "an exchange with no such bucket": (
        _message(_keys(1), write_shares([(BucketId(0, 2), 1)])),
        BadRequest,
        "is none of",
    ),
    "an exchange of too many keys": (
        _message(_keys(*range(101)), write_shares([(BucketId(0, 0), 101)])),
        BatchTooLarge,
        "--lookup-max-keys",
    ),
    "an exchange of other keys": (
        _message(pa.record_batch({"k": ["x"]}), MY_SHARE),
        WrongType,
        "column 'k' is",
    ),
    "an exchange of dictionaries": (
        _message(pa.record_batch({"k": pa.array([1]).dictionary_encode()}), MY_SHARE),
        BadRequest,
        "dictionaries",
    ),
    "a changelog of nothing": (lambda to: to.get(b""), BadRequest, "not JSON"),
    "a changelog of garbage": (lambda to: to.get(b"\x80" * 99), BadRequest, "not JSON"),
    "a changelog of no bucket": (_changelog(buckets=[]), BadRequest, "of 0 buckets"),
    "a changelog of two buckets": (_changelog(buckets=[[0, 0], [0, 1]]), BadRequest, "of 2 buck"),
    "a changelog from below": (_changelog(from_offset=-1), OffsetOutOfRange, "not in the log"),
    "a changelog from above": (_changelog(from_offset=1 << 62), OffsetOutOfRange, "not in the log"),
    "a changelog from nowhere": (_changelog(from_offset=1 << 64), BadRequest, "64 bits"),
    "a changelog from a half": (_changelog(from_offset=0.5), BadRequest, "whole number"),
    "a put to a path": (
        lambda to: _put_to_path(to, "../../etc/passwd"),
        BadRequest,
        "not JSON",
    ),
    "an owner with a path": (
        lambda to: to.action(
            "fence", wire.encode(to.fields(writer="../../x", epoch=1, columns=[1]))
        ),
        InvalidOwner,
        "it has a '/'",
    ),
    "an undo from nowhere": (
        lambda to: to.action(
            "undo", wire.encode(to.fields(buckets=[[0, 0, -1, 999, -1]], columns=[SUM], debtor="x"))
        ),
        InvalidInput,
        "the log ends at",
    ),
    "an undo to nowhere": (
        lambda to: to.action(
            "undo", wire.encode(to.fields(buckets=[[0, 0, -1, 0, 999]], columns=[SUM], debtor="x"))
        ),
        InvalidInput,
        "the log ends at",
    ),
}


def _put_to_path(to: Stranger, path: str) -> None:
    writer, _ = to.client.do_put(flight.FlightDescriptor.for_path(path), ROWS)
    try:
        writer.close()
    except flight.FlightError as exc:
        error = wire.from_flight_error(exc)
        assert error is not None
        raise error from None


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_is_refused(scene: Scene, name: str) -> None:
    call, kind, words = BAD_CALLS[name]
    with scene.unharmed(), pytest.raises(kind, match=words):
        call(scene.stranger)


def test_calls_of_flight_that_there_are_not_are_refused(scene: Scene) -> None:
    client = scene.stranger.client
    before, seen = scene.state(), len(scene.log.lines)
    for call in (
        lambda: list(client.list_flights()),
        lambda: list(client.list_actions()),
        lambda: client.get_flight_info(flight.FlightDescriptor.for_path("x")),
        lambda: client.get_schema(flight.FlightDescriptor.for_path("x")),
    ):
        with pytest.raises((flight.FlightError, OSError), match="there is no call"):
            call()
    refused = [line["message"] for line in scene.log.lines[seen:]]
    assert len([message for message in refused if "there is no such call" in message]) == 4
    assert scene.state() == before


def test_bytes_that_are_no_grpc_at_all_do_not_hurt(scene: Scene) -> None:
    host, port = scene.server.address.split(":")
    before, seed = scene.state(), random.randrange(1 << 32)
    chance = random.Random(seed)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for start in (b"", b"GET / HTTP/1.1\r\n\r\n", preface, preface + b"\x00\x00\x04\x08\x00"):
        connection = socket.create_connection((host, int(port)), timeout=5)
        with connection, suppress(OSError):  # It may be hung up on already.
            connection.sendall(start + chance.randbytes(10_000))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
        assert scene.state() == before, f"seed {seed}"


def test_an_action_whose_name_is_no_text_does_not_hurt(scene: Scene) -> None:
    before = scene.state()
    with pytest.raises(flight.FlightError):
        scene.stranger.action(b"\xff\xfe", b"")
    assert scene.state() == before


@pytest.mark.parametrize(
    "name",
    ["../x", "a/b", "/", "", ".", "..", "a\0b", "x" * 201, "-x", "a b", "é", "\ud800", "a\n"],
)
def test_table_names_with_tricks_are_refused(scene: Scene, name: str) -> None:
    tables = scene.cluster.list_tables()
    with pytest.raises(InvalidInput, match="is not a table name"):
        scene.cluster.create_table(name, SCHEMA)
    with pytest.raises((InvalidInput, UnknownTable)):
        scene.cluster.table(name)
    assert scene.cluster.list_tables() == tables


# --- Chance -------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 3)
    | st.floats()
    | st.text(st.characters(), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=8,
)
ACTIONS = ("lookup", "fence", "undo", "end_recovery", "seal", "ends")
STRANGER = Writer("w", 1)
UNDO_ALL = UndoStep(None, UndoRange(0))


def _good(known: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the fields of a good call."""
    calls: list[BucketsCall[Any]] = [
        Fence(**known, buckets=[FIRST], writer=STRANGER, columns=(SUM,)),
        Undo(
            **known,
            buckets={FIRST: UNDO_ALL},
            writer=STRANGER,
            debtor="nobody",
            columns=(SUM,),
        ),
        EndRecovery(**known, buckets={FIRST: 0}, writer=STRANGER),
        Seal(**known, buckets={FIRST: 0}, writer=STRANGER, batch=1),
        LogEnds(**known, buckets=[FIRST]),
    ]
    return next(call.to_fields() for call in calls if call.name == name)


def _refused(call: Callable[[], object]) -> None:
    """Make a call that may be good by chance; if it is not, the reason is one of ours."""
    try:
        call()
    except ServerFailed:
        raise
    except TallybookError:
        pass


@FEW
@given(action=st.sampled_from(ACTIONS), body=st.binary(max_size=200))
def test_random_bytes_are_refused_by_all_actions(scene: Scene, action: str, body: bytes) -> None:
    with pytest.raises(BadRequest):
        scene.stranger.action(action, body)


@FEW
@given(body=st.binary(max_size=200))
def test_random_bytes_are_refused_as_ticket_and_command(scene: Scene, body: bytes) -> None:
    with pytest.raises(BadRequest):
        scene.stranger.get(body)
    with pytest.raises(BadRequest):
        scene.stranger.put(body, [(GOOD, b"0"), closing(GOOD)])


@FEW
@given(data=st.data())
def test_fields_of_any_shape_are_refused_or_taken_but_never_a_failure(
    scene: Scene, data: st.DataObject
) -> None:
    action = data.draw(st.sampled_from(ACTIONS[1:]))
    fields = _good(scene.stranger.known, action)
    names = data.draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=3))
    for name in names:
        fields[name] = data.draw(JSON)
    _refused(lambda: scene.stranger.action(action, wire.encode(fields)))


@FEW
@given(data=st.data())
def test_puts_and_changelogs_with_fields_of_any_shape_never_fail(
    scene: Scene, data: st.DataObject
) -> None:
    # Without its closing message, nothing of the put could be written.
    stranger = scene.stranger
    before = scene.table.end_offsets()
    fields = {**stranger.changelog_fields(), **stranger.put_fields()}
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(JSON)
    _refused(lambda: stranger.put(wire.encode(fields), [(GOOD, b"0")]))
    _refused(lambda: stranger.get(wire.encode({**fields, "buckets": [[0, 0]]})))
    assert scene.table.end_offsets() == before


@FEW
@given(cut=st.floats(0, 1, exclude_max=True))
def test_a_look_up_that_is_cut_anywhere_is_refused(scene: Scene, cut: float) -> None:
    body = scene.stranger.lookup_body(_keys(*MINE)).to_pybytes()
    # The last eight bytes only say that the stream ends; so does the end of the body.
    with pytest.raises(BadRequest):
        scene.stranger.action("lookup", body[: int(cut * (len(body) - 8))])


@FEW
@given(at=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255))
def test_a_look_up_with_a_damaged_byte_never_fails(scene: Scene, at: float, mask: int) -> None:
    body = bytearray(scene.stranger.lookup_body(_keys(*MINE)).to_pybytes())
    body[int(at * len(body))] ^= mask
    _refused(lambda: scene.stranger.action("lookup", bytes(body)))


def test_after_all_that_nothing_failed_and_nothing_is_held(scene: Scene) -> None:
    """Runs last: all of the above is in the log and the metrics of one server."""
    wait_until(lambda: _gauge(scene, "tallybook_puts_in_flight") == 0, "all puts have ended")
    assert _gauge(scene, "tallybook_bytes_in_flight") == 0
    [status] = scene.cluster.status()
    assert [name for name in status["metrics"] if "ServerFailed" in name] == []
    for line in scene.log.text.splitlines():
        assert {"time", "level", "logger", "message"} <= json.loads(line).keys()
    levels = {line["level"] for line in scene.log.lines}
    assert levels <= {"info", "warning"}


def _gauge(scene: Scene, name: str) -> float:
    [status] = scene.cluster.status()
    return float(status["metrics"][name])
