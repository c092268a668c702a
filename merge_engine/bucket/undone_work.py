"""Which changes of a log were undone: as a debt, so that no cut has ever had them."""

from collections.abc import Mapping, Sequence

from merge_engine.bucket.segment import SegmentHeader


def undo_start(undo: SegmentHeader) -> int:
    """Return the offset from which on an undo takes its debtor's changes back."""
    assert undo.undo_from is not None
    return undo.undo_from


def undone_columns(headers: Sequence[SegmentHeader]) -> dict[int, frozenset[int]]:
    """Return the columns, by the base of a segment, in which it was undone or is an undo.

    As a debt. The headers may be those between two cuts: what is undone so was in neither.
    """
    undone: dict[int, frozenset[int]] = {}
    # By owner and column: the furthest that the undos seen so far go back. None: of all columns,
    # as an undo without rows of an earlier release has it.
    back_to: dict[tuple[str, int | None], int] = {}
    for header in reversed(headers):
        if header.is_payment:
            start = undo_start(header)
            for column in header.column_ids or (None,):
                at = header.owner, column
                back_to[at] = min(start, back_to.get(at, start))
        if header.is_change:
            end, owner = header.end_offset, header.owner
            of_all = back_to.get((owner, None), end)
            gone = [c for c in header.column_ids if end > min(of_all, back_to.get((owner, c), end))]
            if gone:
                undone[header.base_offset] = frozenset(gone)
    return undone


def undone_of(undone: Mapping[int, frozenset[int]], header: SegmentHeader) -> frozenset[int]:
    """Return the columns in which one of these segments was undone."""
    return undone.get(header.base_offset, frozenset())


def is_undone(undone: Mapping[int, frozenset[int]], header: SegmentHeader) -> bool:
    """Whether a change was undone in all of its columns, or is such an undo."""
    columns = undone_of(undone, header)
    return bool(columns) and columns.issuperset(header.column_ids)
