"""What streams are told, before any Spark: their options, and what cannot be meant."""

from typing import Any

import pytest

from foundation.errors import InvalidInput
from recovery.reader.cut import Cut
from sink.source.options import ReaderOptions

CUT = Cut(table="t", epoch=3, time_ms=0)


def options(**given: Any) -> ReaderOptions:
    return ReaderOptions.of({"zookeeper": "127.0.0.1:1", "table": "t", **given}, {})


def test_a_stream_is_told_where_it_starts_and_how_much_it_takes() -> None:
    read = options(
        START="Full", Mode="UPSERTS", maxrowspertrigger="7", lease="mine", leaseDuration="5 min"
    )
    assert (read.start, read.mode, read.max_rows) == ("full", "upserts", 7)
    assert (read.lease, read.lease_duration_ms) == ("mine", 300_000)
    plain = options(start=str(CUT))
    assert (plain.start, plain.mode, plain.max_rows) == (str(CUT), "changes", None)
    assert plain.lease_duration_ms == 24 * 3_600_000
    assert options().start is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"start": "soon"},
            '`start` is "full", "earliest", "latest", or a cut; and \'soon\' is no',
        ),
        ({"start": ""}, '`start` is "full"'),
        ({"start": str(CUT)[:-3]}, "or it was cut short"),
        ({"start": "full", "mode": "both"}, "`mode` is `changes` or `upserts`, not 'both'"),
        ({"start": "full", "maxRowsPerTrigger": "0"}, "is a number of rows, not '0'"),
        ({"start": "full", "maxRowsPerTrigger": "-1"}, "is a number of rows, not '-1'"),
        ({"start": "full", "maxRowsPerTrigger": "1e3"}, "is a number of rows, not '1e3'"),
        ({"start": "full", "maxRowsPerTrigger": "many"}, "is a number of rows, not 'many'"),
        ({"start": "full", "maxRowsPerTrigger": str(2**63)}, "is a number of rows, not '9223"),
        ({"start": "full", "leaseDuration": "long"}, "leaseDuration"),
        ({"start": "full", "at": str(CUT)}, "leave `at` and `isolation`"),
        ({"start": "full", "isolation": "latest"}, "leave `at` and `isolation`"),
        ({"mode": "upserts"}, "only for streams, which say where they start"),
        ({"maxRowsPerTrigger": "5"}, "only for streams, which say where they start"),
        ({"leaseDuration": "5 s"}, "only for streams, which say where they start"),
        ({"start": "full", "maxRowPerTrigger": "5"}, "did you mean"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, str], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        options(**given)
