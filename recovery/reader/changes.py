"""The changes of a bucket as records with finished values, committed or latest."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from foundation.ids import BucketId
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.changelog import change_records, changelog_schema
from merge_engine.bucket.segment import Segment, SegmentHeader
from merge_engine.bucket.undone_work import is_undone, undone_columns, undone_of
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.schema.schema import Schema
from recovery.reader.cut import BucketCut
from recovery.reader.isolation import ReadRecords, committed_changes
from recovery.reader.later import later_headers, read_later


@dataclass(frozen=True)
class BucketChanges:
    """The changes of the offsets [start, end), all under one schema; `end` is where to go on."""

    start: int
    end: int
    history: SchemaHistory
    _segments: Iterable[Segment]

    @property
    def schema(self) -> Schema:
        """The table's schema under which all of them are shown."""
        return self.history.current

    @property
    def arrow_schema(self) -> pa.Schema:
        """What a record has."""
        return changelog_schema(self.schema)

    def records(self) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield batches of records, each with where to go on after it."""
        for segment in self._segments:
            if segment.changes:
                first = max(segment.header.base_offset, self.start)
                following = min(segment.header.end_offset, self.end)
                yield change_records(segment, self.history, first), following


def open_changes(
    bucket: Bucket,
    key: BucketId,
    read_records: ReadRecords,
    from_offset: int,
    to_offset: int | None,
    *,
    committed: bool,
) -> BucketChanges:
    """Return the changes in [from, to): those below the last stable offset, or all there are."""
    segments: Iterable[Segment]
    if committed:
        found = committed_changes(bucket, key, read_records, from_offset, to_offset)
        segments, end = found, found.end
    else:
        end = bucket.settled_end()
        end = end if to_offset is None else min(end, to_offset)
        segments = bucket.read_log(from_offset, end)
    # Now that the end is fixed: this schema knows all that was written before it.
    return BucketChanges(from_offset, max(from_offset, end), bucket.history, segments)


def open_changes_between(
    bucket: Bucket, since: BucketCut | None, until: BucketCut, *, after: int = 0
) -> BucketChanges:
    """Return the changes that lead from one cut to a later one, without what was undone again.

    `since` None: from as far back as there is a log. `after`: from this offset on, for whoever has
    had what comes before. Deposed: another leader has come, and knows more. CutTooOld: some of the
    changes were cleaned.
    """
    headers = headers_between(bucket, since, until)
    undone = undone_columns(headers)
    wanted = [one for one in headers if one.base_offset >= after and not is_undone(undone, one)]

    def segments() -> Iterator[Segment]:
        for segment in read_later(bucket, since, wanted):
            hidden = undone_of(undone, segment.header)
            yield segment.without(hidden) if hidden else segment

    end = wanted[-1].end_offset if wanted else after
    return BucketChanges(0, end, bucket.history, segments())


def headers_between(
    bucket: Bucket, since: BucketCut | None, until: BucketCut
) -> list[SegmentHeader]:
    """Return the headers of the changes that are in one cut and came after another."""
    # What is in the later cut is in this log, for its leader still leads.
    end = bucket.confirm()
    if since is None:
        found = [one for one in bucket.headers(bucket.start_offset, end) if one.is_change]
    else:
        found = later_headers(bucket, since, end)
    later = {one.base_offset for one in later_headers(bucket, until, end)}
    return [one for one in found if one.base_offset not in later]
