"""A cluster whose logs are in an object store: a server that is lost takes nothing with it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from foundation.errors import ServerNotStarted
from foundation.ids import Token
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.storage.objects import open_storage
from server.launch.local_cluster import LocalCluster
from tests.support.moto_server import S3Server, s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def variables(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers find endpoint and credentials in their environment."""
    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)


SCHEMA = (
    SchemaBuilder()
    .column("id", pa.int64())
    .agg_column("orders", pa.int64(), "sum")
    .primary_key("id")
    .build()
)


@pytest.mark.usefixtures("variables")
def test_what_was_acknowledged_is_in_the_object_store(s3: S3Server, tmp_path: Path) -> None:
    logs = f"{s3.create_bucket()}/logs"
    keys = list(range(20))
    servers = LocalCluster(tmp_path, servers=2, logs=logs, session_timeout_s=2)
    with servers as cluster, cluster.connect() as client:
        table = client.create_table("orders", SCHEMA, buckets=2, column_locks=False)
        for batch in range(3):
            table.put({"id": keys, "orders": [1] * 20}, owner="me", token=Token(1, batch))
        cluster.servers[0].kill()
        table.put({"id": keys, "orders": [1] * 20}, owner="me", token=Token(1, 3))
        assert table.lookup({"id": keys}).column("orders").to_pylist() == [4] * 20
    for views in tmp_path.glob("views-*"):
        shutil.rmtree(views)
    with LocalCluster(tmp_path, servers=1, logs=logs) as cluster, cluster.connect() as client:
        found = client.table("orders").lookup({"id": keys})
        assert found.column("orders").to_pylist() == [4] * 20


@pytest.mark.usefixtures("variables")
def test_a_server_that_cannot_use_the_store_does_not_join_and_leaves_no_word_of_it(
    s3: S3Server, tmp_path: Path
) -> None:
    """Least of all the first one, whose word on where the logs are would bind all others."""
    with pytest.raises(ServerNotStarted) as refused:
        LocalCluster(tmp_path, logs="s3://no-such-bucket/logs").start()
    for words in (
        "the server did not start: the log store at s3://no-such-bucket/logs cannot be used",
        "creating an object failed",
        "404 Not Found",
        "AWS_ENDPOINT_URL",
        "of these there are: AWS_ACCESS_KEY_ID, ",
    ):
        assert words in str(refused.value)
    logs = f"{s3.create_bucket()}/logs"
    with LocalCluster(tmp_path, logs=logs) as cluster, cluster.connect() as client:
        client.create_table("orders", SCHEMA, buckets=1).end_offsets()
        assert open_storage(logs).names() == []
