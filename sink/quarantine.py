"""Bad rows, set aside as Parquet with the reason: a replayed batch writes the same files again."""

import hashlib

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs


def set_aside(rows: pa.Table, path: str, owner: str, batch: int, part: int = 0) -> str:
    """Write the rows of one part of a batch, in the place of what an earlier attempt wrote."""
    filesystem, directory = fs.FileSystem.from_uri(path) if "://" in path else _local(path)
    owned = hashlib.sha256(owner.encode()).hexdigest()[:12]
    name = f"{directory}/owner-{owned}-batch-{batch}-part-{part}.parquet"
    filesystem.create_dir(directory, recursive=True)
    temporary = f"{name}.writing"
    pq.write_table(rows, temporary, filesystem=filesystem)
    filesystem.move(temporary, name)
    return name


def _local(path: str) -> tuple[fs.FileSystem, str]:
    return fs.LocalFileSystem(), path
