"""Bad rows, set aside as Parquet with the reason: a replayed batch writes the same files again.

    table-<uid>-owner-<hash>-batch-<number>-epoch-<number>-part-<number>.parquet

Rows are staged first, in a file that its name hides from readers, and published by the driver when
it knows whose they are: what a task stages that was given up, or came late, nobody publishes. An
epoch clears what its own and earlier ones have left of the batch, never a later one's: a driver
that was paused, and comes back, has nothing to do with its successor's files.

A file is readable whatever is in it: a column with text that is not UTF-8 is written as bytes. Its
pages have checksums, for readers that look at them; Tallybook itself never reads a file again.
"""

import hashlib
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from foundation.errors import InvalidInput
from merge_engine.encoding.soundness import readable

_OF_EPOCH = re.compile(r"epoch-(\d+)-")


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """Where an owner's bad rows of one batch of a table go, in one epoch. Can be pickled.

    `batch` is by the owner's count.
    """

    path: str
    table: str
    owner: str
    batch: int
    epoch: int

    def stage(self, rows: pa.Table, part: str = "0") -> str:
        """Write the rows of one part where readers do not look; return the file's name."""
        filesystem, directory = _open(self.path)
        filesystem.create_dir(directory, recursive=True)
        name = f".{self._of_batch}epoch-{self.epoch}-part-{part}.parquet.{uuid.uuid4().hex}"
        pq.write_table(
            readable(rows),
            f"{directory}/{name}",
            filesystem=filesystem,
            write_page_checksum=True,
        )
        return name

    def publish(self, staged: Iterable[str]) -> list[str]:
        """Give staged files the names under which readers find them; return those."""
        filesystem, directory = _open(self.path)
        published = []
        for name in staged:
            target = f"{directory}/{name[1:].rpartition('.')[0]}"
            filesystem.move(f"{directory}/{name}", target)
            published.append(target)
        return published

    def clear(self) -> None:
        """Remove what this and earlier epochs have left of the batch, and what nobody published.

        An earlier attempt may have had other parts, by the other route or of another number of
        source partitions.
        """
        filesystem, directory = _open(self.path)
        for name, epoch in self._files(filesystem, directory):
            of_batch = name.startswith(self._of_batch)
            staged = name.startswith(f".{self._of_owner}")
            if (of_batch or staged) and epoch <= self.epoch:
                filesystem.delete_file(f"{directory}/{name}")

    def is_superseded(self) -> bool:
        """Whether a later epoch has published bad rows of this batch."""
        files = self._files(*_open(self.path))
        return any(n.startswith(self._of_batch) and epoch > self.epoch for n, epoch in files)

    @staticmethod
    def _files(filesystem: fs.FileSystem, directory: str) -> Iterator[tuple[str, int]]:
        """Yield the names of all files, with their epochs; what has none is not ours."""
        for found in filesystem.get_file_info(fs.FileSelector(directory, allow_not_found=True)):
            epoch = _OF_EPOCH.search(found.base_name)
            if epoch is not None:
                yield found.base_name, int(epoch[1])

    @property
    def _of_owner(self) -> str:
        owner = hashlib.sha256(self.owner.encode()).hexdigest()[:12]
        return f"table-{self.table}-owner-{owner}-batch-"

    @property
    def _of_batch(self) -> str:
        return f"{self._of_owner}{self.batch}-"


def check_place(path: str) -> None:
    """Make the directory for bad rows, or see that it can be written to; InvalidInput if not.

    Before anything is written: else a batch would find out, the first that has a bad row.
    """
    try:
        filesystem, directory = _open(path)
        filesystem.create_dir(directory, recursive=True)
        probe = f"{directory}/.tallybook-{uuid.uuid4().hex}"
        filesystem.open_output_stream(probe).close()
        filesystem.delete_file(probe)
    except (OSError, pa.ArrowException) as exc:
        raise InvalidInput(
            f"bad rows cannot be set aside below quarantine_path {path!r}: {exc}. Give a directory "
            "that driver and executors can make and write to, or bad_rows='fail'"
        ) from exc


def _open(path: str) -> tuple[fs.FileSystem, str]:
    if "://" in path:
        filesystem, directory = fs.FileSystem.from_uri(path)
        return filesystem, directory
    return fs.LocalFileSystem(), path
