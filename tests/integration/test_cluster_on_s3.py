"""A cluster whose logs are in an object store: a server that is lost takes nothing with it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from merge_engine import SchemaBuilder, Token
from server.local_cluster import LocalCluster
from tests.moto_server import S3Server, s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def test_what_was_acknowledged_is_in_the_object_store(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers find endpoint and credentials in their environment."""
    for name, value in {
        "AWS_ENDPOINT_URL": s3.endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }.items():
        monkeypatch.setenv(name, value)
    schema = (
        SchemaBuilder()
        .column("id", pa.int64())
        .agg_column("orders", pa.int64(), "sum")
        .primary_key("id")
        .build()
    )
    logs = f"{s3.create_bucket()}/logs"
    keys = list(range(20))
    servers = LocalCluster(tmp_path, servers=2, logs=logs, session_timeout_s=2)
    with servers as cluster, cluster.connect() as client:
        table = client.create_table("orders", schema, buckets=2, column_locks=False)
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
