"""Undos: a call goes on for about a second, and is made again for what is left."""

from collections.abc import Iterable, Mapping

from foundation.ids import BucketId
from merge_engine.bucket.results import UndoResult
from merge_engine.bucket.undo import UndoRange
from recovery.leader.fenced_writers import Writer
from recovery.writer.access import Answers, Terms
from server.client.steps import until_done
from server.client.table_caller import TableCaller
from server.protocol.writers import Undo, UndoStep

Ranges = Mapping[BucketId, UndoRange]


def undo_some(
    caller: TableCaller,
    debtor: str,
    columns: Iterable[int],
    ranges: Ranges,
    *,
    writer: Writer | None = None,
    terms: Terms | None = None,
) -> Answers[UndoResult]:
    """Ask the servers once to go on with an undo.

    `writer` and `terms`: of a column lock's holder; then a leader that moved is not waited for.
    """
    call = Undo(
        table_id=caller.table.table_id,
        schema_version=caller.schema.version,
        buckets={
            key: UndoStep(None if terms is None else terms[key], wanted)
            for key, wanted in ranges.items()
        },
        writer=writer,
        debtor=debtor,
        columns=tuple(sorted(columns)),
    )
    answers = caller.call(call, patient=terms is None)
    results = {key: one.result(ranges[key]) for key, one in answers.results.items()}
    return Answers(results, answers.sessions)


def undo_all(
    caller: TableCaller, debtor: str, columns: Iterable[int], ranges: Ranges
) -> dict[BucketId, UndoResult]:
    """Ask until all is undone; for tables without column locks."""
    ids = list(columns)
    return until_done(
        ranges,
        lambda rest: undo_some(caller, debtor, ids, rest).results,
        lambda _, result: result.rest,
        UndoResult.then,
    )
