"""Bad rows, set aside as Parquet with the reason: a replayed batch writes the same files again."""

import hashlib
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs


def set_aside(rows: pa.Table, path: str, owner: str, batch: int, part: int = 0) -> str:
    """Write the rows of one part of a batch, in the place of what an earlier attempt wrote.

    Two attempts at once, as of a speculative task, write one file: each its own first, hidden from
    readers by its name, and then one moves it over the other's.
    """
    filesystem, directory = _open(path)
    name = f"{_prefix(owner, batch)}{part}.parquet"
    filesystem.create_dir(directory, recursive=True)
    temporary = f"{directory}/.{name}.{uuid.uuid4().hex}"
    pq.write_table(rows, temporary, filesystem=filesystem)
    filesystem.move(temporary, f"{directory}/{name}")
    return f"{directory}/{name}"


def clear(path: str, owner: str, batch: int) -> None:
    """Remove what an earlier attempt at a batch has set aside.

    It may have had other parts, by the other route or of another number of source partitions.
    """
    filesystem, directory = _open(path)
    prefix = _prefix(owner, batch)
    for found in filesystem.get_file_info(fs.FileSelector(directory, allow_not_found=True)):
        if found.base_name.lstrip(".").startswith(prefix):
            filesystem.delete_file(found.path)


def _prefix(owner: str, batch: int) -> str:
    return f"owner-{hashlib.sha256(owner.encode()).hexdigest()[:12]}-batch-{batch}-part-"


def _open(path: str) -> tuple[fs.FileSystem, str]:
    if "://" in path:
        filesystem, directory = fs.FileSystem.from_uri(path)
        return filesystem, directory
    return fs.LocalFileSystem(), path
