"""A tablet server in this process, and a stranger: a Flight client that sends what it is told."""

import io
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import flight

from foundation.ids import BucketId
from merge_engine.bucket.segment import AggMode
from recovery.reader.isolation import Isolation
from server.client.cluster import Cluster, connect
from server.client.remote_table import RemoteTable
from server.launch.logs import JsonFormatter
from server.protocol import wire
from server.protocol.puts import Put
from server.protocol.reads import LogEnds, Lookup, LookupStream, ReadChangelog, Scan
from server.tablet.config import ServerConfig
from server.tablet.tablet_server import TabletServer
from tests.conftest import schema_of

SCHEMA = schema_of(a=(pa.int64(), "sum"), note=(pa.string(), "last_value"))
ROWS = pa.schema([("k", pa.int64()), ("a", pa.int64())])
KEYS = pa.schema([("k", pa.int64())])
FIRST = BucketId(0, 0)
TIMEOUT_S = 20.0

Message = tuple[pa.RecordBatch | None, bytes | None]


class JsonLog:
    """What the server logs meanwhile, as the lines of its log file."""

    def __init__(self) -> None:
        self._stream = io.StringIO()
        self.handler = logging.StreamHandler(self._stream)
        self.handler.setFormatter(JsonFormatter())

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


@contextmanager
def json_log() -> Iterator[JsonLog]:
    """Collect what this process logs."""
    log = JsonLog()
    root = logging.getLogger()
    level = root.level
    root.addHandler(log.handler)
    root.setLevel(logging.INFO)
    try:
        yield log
    finally:
        root.removeHandler(log.handler)
        root.setLevel(level)


def running(zookeeper: str, directory: Path, **settings: Any) -> TabletServer:
    """Return a server that is to be entered; everything of it is below the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    return TabletServer(
        ServerConfig(
            zookeeper=zookeeper,
            logs=str(directory / "logs"),
            views=directory / "views",
            session_timeout_s=5,
            **settings,
        )
    )


class Stranger:
    """Sends anything to a server, and raises what the server says of it as our errors."""

    def __init__(self, address: str, table: RemoteTable) -> None:
        self.table = table
        self.client = flight.FlightClient(f"grpc://{address}")
        self._options = flight.FlightCallOptions(timeout=TIMEOUT_S)

    def close(self) -> None:
        self.client.close()

    def fields(self, **changes: Any) -> dict[str, Any]:
        """Return what every good request has, with changes."""
        return {**LogEnds(**self.known, buckets=[FIRST]).to_fields(), **changes}

    @property
    def known(self) -> dict[str, Any]:
        """The table, as all calls name it."""
        return {"table_id": self.table.table_id, "schema_version": self.table.schema.version}

    def put_fields(self, **changes: Any) -> dict[str, Any]:
        """Return the command of a good put to bucket 0, with changes."""
        good = Put(**self.known, buckets={FIRST: None}, mode=AggMode.ACCUMULATE, owner="")
        unsaid = dict.fromkeys(("columns", "operation_column", "token"))
        return {**unsaid, **good.to_fields(), **changes}

    def action(self, name: str | bytes, body: Any) -> pa.Buffer:
        with _ours():
            [answer] = self.client.do_action(flight.Action(name, body), self._options)
            return answer.body

    def look_up(self, keys: Iterable[int], **changes: Any) -> pa.Buffer:
        batch = pa.record_batch([pa.array(keys, pa.int64())], schema=KEYS)
        return self.action("lookup", self.lookup_body(batch, **changes))

    def lookup_body(self, *batches: pa.RecordBatch, **changes: Any) -> pa.Buffer:
        columns = (self.table.schema.value_columns[0].id,)
        good = Lookup(**self.known, buckets=[FIRST], columns=columns, isolation=Isolation.LATEST)
        return wire.frame({**good.to_fields(), **changes}, KEYS, batches)

    def exchange_fields(self, **changes: Any) -> dict[str, Any]:
        """Return the command of a good exchange of look-ups, with changes."""
        columns = (self.table.schema.value_columns[0].id,)
        good = LookupStream(**self.known, columns=columns, isolation=Isolation.LATEST)
        return {**good.to_fields(), **changes}

    def exchange(
        self, command: bytes, messages: Iterable[Message], schema: pa.Schema = KEYS
    ) -> list[pa.RecordBatch]:
        """Exchange these messages, one after the other, for answers."""
        descriptor = flight.FlightDescriptor.for_command(command)
        with _ours():
            writer, reader = self.client.do_exchange(descriptor, self._options)
            try:
                answers: list[pa.RecordBatch] = []
                for batch, metadata in messages:
                    if batch is None:
                        writer.write_metadata(metadata)
                    else:
                        if not answers:
                            writer.begin(schema)
                        writer.write_with_metadata(batch, metadata)
                    answers.append(reader.read_chunk().data)
                return answers
            finally:
                writer.close()

    def scan_ticket(self, **changes: Any) -> bytes:
        """Return the ticket of a good scan of bucket 0, with changes."""
        columns = tuple(column.id for column in self.table.schema.value_columns)
        good = Scan(**self.known, bucket=FIRST, columns=columns, isolation=Isolation.LATEST)
        return wire.encode({**good.to_fields(), **changes})

    def changelog_fields(self, **changes: Any) -> dict[str, Any]:
        """Return the ticket of a good changelog of bucket 0, with changes."""
        good = ReadChangelog(**self.known, bucket=FIRST, from_offset=0, isolation=Isolation.LATEST)
        return {**good.to_fields(), **changes}

    def get(self, ticket: bytes) -> pa.Table:
        with _ours():
            return self.client.do_get(flight.Ticket(ticket), self._options).read_all()

    def put(
        self, command: bytes, messages: Iterable[Message], schema: pa.Schema = ROWS
    ) -> wire.Fields:
        """Send a put of these messages: a batch and its metadata, or one of the two."""
        with _ours():
            writer, answers = self.begin(command, schema)
            try:
                for batch, metadata in messages:
                    if batch is None:
                        writer.write_metadata(metadata)
                    elif metadata is None:
                        writer.write_batch(batch)
                    else:
                        writer.write_with_metadata(batch, metadata)
                writer.done_writing()
                answer = answers.read()
            finally:
                writer.close()
            return wire.decode(answer)

    def begin(self, command: bytes, schema: pa.Schema = ROWS) -> tuple[Any, Any]:
        """Return an open put: the writer, and the reader of answers."""
        descriptor = flight.FlightDescriptor.for_command(command)
        return self.client.do_put(descriptor, schema, self._options)  # type: ignore[no-any-return]


@contextmanager
def _ours() -> Iterator[None]:
    try:
        yield
    except flight.FlightError as exc:
        error = wire.from_flight_error(exc)
        if error is None:
            raise
        raise error from None


@contextmanager
def held_put(stranger: Stranger, batch: pa.RecordBatch) -> Iterator[None]:
    """Keep a put open that has sent a batch, for the duration of the block."""
    writer, _ = stranger.begin(wire.encode(stranger.put_fields()), batch.schema)
    writer.write_with_metadata(batch, b"0")
    try:
        yield
    finally:
        try:
            writer.close()
        except flight.FlightError as exc:
            assert "cut short" in str(exc), exc  # noqa: PT017


def closing(*batches: pa.RecordBatch) -> Message:
    """Return the closing message of a put of these batches."""
    checksum = wire.Checksum()
    for batch in batches:
        checksum.add(batch)
    return None, checksum.closing()


def client_of(zookeeper: str, **settings: Any) -> Cluster:
    """Return a client that does not wait long."""
    return connect(zookeeper, **{"deadline_s": 15.0, "attempt_s": 10.0, **settings})
