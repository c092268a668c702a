"""The tree of errors: drawn once, and told page by page as it is."""

import inspect
import re
from pathlib import Path

import pytest

import tallybook as tb
from foundation import errors
from foundation.errors import TallybookError
from tests.conftest import SUMS

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, TallybookError)
}


def test_the_drawing_is_the_tree() -> None:
    drawn = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines()[2:]:
        found = re.match(r"([│ ├└─]*)(\w+)", line)
        assert found is not None
        depth = len(found[1]) // 4
        above[depth:] = [found[2]]
        drawn[found[2]] = above[depth - 1] if depth else None
    assert drawn == {
        name: None if kind is TallybookError else kind.__bases__[0].__name__
        for name, kind in CLASSES.items()
    }


def test_each_error_says_what_to_do() -> None:
    assert all((kind.__doc__ or "").strip() for kind in CLASSES.values())


def test_the_page_has_each_error_once_and_below_its_group() -> None:
    told: dict[str, str] = {}
    group = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            [group] = re.findall(r"`(\w+)`", line) or ["TallybookError"]
            told.setdefault(group, group)
        if line.startswith("| `"):
            for name in re.findall(r"`(\w+)`", line.split("|")[1]):
                assert told.setdefault(name, group) == group, f"{name} is told twice"
    assert set(told) == set(CLASSES) | {"TallybookError"}
    wrong = {n: g for n, g in told.items() if not issubclass(CLASSES[n], CLASSES[g])}
    assert not wrong


def test_a_group_is_what_callers_catch(tmp_path: Path) -> None:
    """What to do next is the group's: nobody has to know the classes below it."""
    with tb.Table.create(tmp_path / "sums", SUMS, buckets=1) as table:
        with pytest.raises(tb.errors.InvalidInput, match="zz"):
            table.put({"k": [1], "zz": [1]})
        with (
            table.writer(owner_id="etl", columns=["a"]),
            pytest.raises(tb.errors.Refused, match="etl"),
        ):
            table.put({"k": [1], "a": [1]})
        table.put({"k": [1], "a": [1]})
        cut = table.cut()
        table.put({"k": [1], "a": [1]})
        table.clean()
        with pytest.raises(tb.errors.Expired, match="take another cut"):
            table.scan(at=cut).to_arrow()
