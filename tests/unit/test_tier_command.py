"""`tallybook tier` and its job, as far as they go without a cluster: what is refused and said."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foundation.errors import InvalidInput
from recovery.reader.cut import Cut
from sink.tiering.job import TieringJob
from sink.tiering.options import TieringOptions
from sink.tiering.progress import Lag, Round, RoundKind, Summary, Underway
from tallybook import cli

NOWHERE: Any = None


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--interval -1", "interval_s is -1; it is a number of seconds, 0 or more"),
        ("--retention inf", "retention_s is inf; it is a number of seconds, 0 or more"),
        ("--retention nan", "retention_s is nan; it is a number of seconds, 0 or more"),
        ("--lag-target 0", "lag_target_s is 0; it is more than 0"),
        ("--lease 0", "lease_s is 0; a lease lasts from 2 s to 604800 s"),
        ("--lease 1", "lease_s is 1; a lease lasts from 2 s to 604800 s"),
        ("--hold 1e6", "hold_s is 1e+06; a lease lasts from 2 s to 604800 s"),
        ("--storage x", "--storage x: write NAME=VALUE"),
        ("--storage region=x", "is a directory and takes no settings: ['region']"),
        ("--format parquet --layout vectors", "the format parquet has no deletion vectors"),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_anything_is_done(
    words: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "lake"
    options = ["--zookeeper", "127.0.0.1:1", "--to", str(to), *words.split()]
    assert cli.main(["tier", "accounts", *options]) == 1
    said = capsys.readouterr().err
    assert said.startswith("tallybook tier: ")
    assert why in said
    assert said.count("\n") == 1
    assert not to.exists()


@pytest.mark.parametrize("port", ["-1", "65536", "http"])
def test_a_port_that_is_none_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tier", "accounts", "--to", "lake", f"--metrics-port={port}"]) == 2
    assert f"{port!r} is no port: a number from 0 to" in capsys.readouterr().err


def test_a_round_may_not_be_tried_less_than_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="attempts is 0; it is 1 or more"):
        TieringOptions(table="accounts", to=str(tmp_path), attempts=0)


def test_what_a_job_says_has_words_for_one_and_for_many() -> None:
    cut = Cut(table="t", epoch=None, time_ms=0, owners={})
    one = Round(
        kind=RoundKind.CHANGES,
        number=2,
        version=3,
        cut=cut,
        rows=1,
        bytes=1536,
        files=1,
        table_rows=1_000,
        compacted=2_000,
        seconds=0.25,
        lag=Lag(batches=1, seconds=0.5),
    )
    assert str(one) == (
        "round 2: applied what changed: 1 row, 0 deleted, 2,000 compacted, 1.5 KiB in 0.2 s; the "
        "copy has 1,000 rows in 1 file (version 3), 1 batch, 0.5 s behind"
    )
    assert str(Lag(batches=2, seconds=0)) == "2 batches, 0.0 s behind"
    done = Summary(failed=1).plus(one)
    assert str(done) == (
        "1 round in 0.0 s: 1 row, 0 deleted, 1.5 KiB, 1 failed attempt; the copy is at version 3"
    )
    assert str(Summary()) == "0 rounds in 0.0 s: 0 rows, 0 deleted, 0.0 KiB"
    underway = Underway("all rows", tasks=8, done=1, rows=2, bytes=3 << 20, seconds=5.0)
    assert str(underway) == "all rows: 1 of 8 tasks done after 5 s, 2 rows, 3.0 MiB"


@pytest.mark.parametrize(
    ("kind", "behind_s"),
    [(RoundKind.CHANGES, 60.0), (RoundKind.NOTHING, 60.0), (RoundKind.COPY, None)],
)
def test_after_a_quiet_hour_a_copy_is_not_an_hour_behind(
    kind: RoundKind, behind_s: float | None, tmp_path: Path
) -> None:
    """A batch comes while the round runs, and the last one before it is an hour old."""
    job = TieringJob(NOWHERE, NOWHERE, TieringOptions(table="accounts", to=str(tmp_path)))
    cut = Cut(table="t", epoch=None, time_ms=0, owners={})
    copy: Any = SimpleNamespace(
        round=lambda _: Round(kind=kind, number=1, version=1, cut=cut),
        lag=lambda: Lag(batches=1, seconds=3600.0),
        tell=lambda _: None,
    )
    job._copy = copy
    done = job._round(copy, NOWHERE)
    assert done is not None
    assert done.lag.batches == 1
    # The first copy is as old as the snapshots that it was made of.
    assert done.lag.seconds < behind_s if behind_s else done.lag.seconds == 3600.0


def test_of_a_task_that_failed_the_job_says_what_was_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = TieringJob(NOWHERE, NOWHERE, TieringOptions(table="accounts", to=str(tmp_path)))
    spark_says = "An exception was thrown from the Python worker:\nTraceback\n  File\nKeyError: 'k'"
    for exc in (RuntimeError(spark_says), RuntimeError("no answer\nand more"), RuntimeError()):
        job._note_failure("a round", exc)
    assert [one.getMessage() for one in caplog.records] == [
        "a round of table accounts failed: KeyError: 'k'",
        "a round of table accounts failed: no answer",
        "a round of table accounts failed: RuntimeError",
    ]
    assert job.summary.failed == 3


def test_while_a_copy_is_too_far_behind_rounds_follow_without_pause_or_compaction(
    tmp_path: Path,
) -> None:
    options = TieringOptions(
        table="accounts", to=str(tmp_path), interval_s=3600.0, lag_target_s=10.0
    )
    cut = Cut(table="t", epoch=None, time_ms=0, owners={})
    lags, compacted = iter([60.0, 30.0, 5.0]), []

    def compact(_: int) -> int:
        compacted.append(len(told))
        job.stop()
        return 0

    copy: Any = SimpleNamespace(
        round=lambda _: Round(kind=RoundKind.COPY, number=1, version=1, cut=cut),
        lag=lambda: Lag(batches=1, seconds=next(lags)),
        compact=compact,
        clean=lambda: 0,
        shown=lambda done: done,
        tell=lambda _: None,
    )
    told: list[Any] = []
    job = TieringJob(NOWHERE, NOWHERE, options, told.append)
    job._copy = copy
    job._run(copy, NOWHERE)
    assert [done.lag.seconds for done in told] == [60.0, 30.0, 5.0]
    assert compacted == [2], "only after the round that has caught up"
