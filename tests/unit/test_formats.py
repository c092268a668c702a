"""Tables of versions: the number that is found chooses the reader, and nothing else does."""

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from foundation.formats import Formats


class TooNew(Exception):
    """What the format of these tests raises."""


@dataclass(frozen=True)
class Greeting:
    """What the format of these tests stores. Version 1 had no language: it was English."""

    text: str
    language: str


Read = Callable[[str], Greeting]


def read_format_1(body: str) -> Greeting:
    return Greeting(body, "en")


def read_format_2(body: str) -> Greeting:
    return Greeting(**json.loads(body))


# As the release before had it, and as the next one has it: a reader more, and nothing less.
BEFORE: Formats[Read] = Formats(
    name="greeting", current=1, readers={1: read_format_1}, error=TooNew
)
AFTER: Formats[Read] = Formats(
    name="greeting", current=2, readers={1: read_format_1, 2: read_format_2}, error=TooNew
)


def read(formats: Formats[Read], data: str) -> Greeting:
    version, _, body = data.partition(":")
    return formats.reader(int(version), "greeting 7")(body)


def test_an_added_version_is_read_beside_the_last_one() -> None:
    old, new = "1:hello", '2:{"text": "servus", "language": "de-AT"}'
    assert read(BEFORE, old) == Greeting("hello", "en")
    assert read(AFTER, old) == Greeting("hello", "en")
    assert read(AFTER, new) == Greeting("servus", "de-AT")
    with pytest.raises(TooNew) as refused:
        read(BEFORE, new)
    assert str(refused.value) == (
        "greeting 7 of format 2, this release reads 1; it was written by a newer release: upgrade"
    )


def test_a_version_is_read_a_release_before_it_is_written() -> None:
    between: Formats[Read] = Formats(
        name="greeting", current=1, readers=AFTER.readers, error=TooNew
    )
    assert between.current == 1
    assert read(between, '2:{"text": "servus", "language": "de-AT"}').language == "de-AT"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (4, "of format 4, this release reads 2 and 3; .* by a newer release: upgrade, or not$"),
        (1, "of format 1, this release reads 2 and 3; .* by another release: use that one, or not"),
        (0, "of format 0, .* another release"),
        (-1, "of format -1, .* another release"),
        (True, "of format True, .* another release"),
        (2.0, r"of format 2\.0, .* another release"),
        ("2", "of format 2, .* another release"),
        (None, "of format None, .* another release"),
        ([2], r"of format \[2\], .* another release"),
    ],
)
def test_any_other_version_is_refused_with_what_is_read_and_the_way_out(
    found: object, words: str
) -> None:
    formats = Formats(name="x", current=3, readers={3: "third", 2: "second"}, error=TooNew)
    assert formats.reader(2, "x") == "second"
    with pytest.raises(TooNew, match=f"^x 7 {words}"):
        formats.reader(found, "x 7", ", or not")


def test_all_versions_that_are_read_are_named() -> None:
    formats = Formats(name="x", current=1, readers=dict.fromkeys((2, 1, 3)), error=TooNew)
    with pytest.raises(TooNew, match="this release reads 1, 2 and 3; "):
        formats.reader(4, "x")


def test_what_is_written_can_be_read() -> None:
    with pytest.raises(ValueError, match="nothing reads version 3 of x, which is written"):
        Formats(name="x", current=3, readers={1: "first", 2: "second"}, error=TooNew)


def test_a_table_does_not_change() -> None:
    readers = {1: "first"}
    formats = Formats(name="x", current=1, readers=readers, error=TooNew)
    readers[2] = "second"
    assert dict(formats.readers) == {1: "first"}
    with pytest.raises(TypeError):
        formats.readers[2] = "second"  # type: ignore[index]
