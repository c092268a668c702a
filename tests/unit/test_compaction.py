"""Which files of a copy are written anew: few, but so that neither files nor dead rows pile up."""

import math
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from foundation.ids import BucketId
from sink.lake.files import FILE_ROWS
from sink.lake.state import LakeFile
from sink.tiering.compaction import choose_groups
from tests.support.lakes import a_file

BUCKETS = st.builds(BucketId, st.integers(0, 2), st.integers(0, 2))
SIZES = st.one_of(st.integers(1, 100), st.integers(1, FILE_ROWS))


@st.composite
def some_files(draw: st.DrawFn) -> LakeFile:
    rows = draw(SIZES)
    dead = draw(st.one_of(st.just(0), st.integers(0, rows - 1)))
    return a_file(rows, bucket=draw(BUCKETS), dead=range(dead))


def live(files: tuple[LakeFile, ...]) -> int:
    return sum(file.live for file in files)


@given(st.lists(some_files(), max_size=60), st.integers(0, 10**6))
def test_groups_are_of_one_bucket_each_file_once_and_within_the_budget(
    files: list[LakeFile], most_rows: int
) -> None:
    groups = choose_groups(files, most_rows)
    chosen = [file.name for group in groups for file in group]
    assert len(chosen) == len(set(chosen))
    assert set(chosen) <= {file.name for file in files}
    for group in groups:
        assert group
        assert len({file.bucket for file in group}) == 1
    assert sum(map(live, groups)) <= most_rows or len(groups) == 1
    everything = choose_groups(files, 10**12)
    assert bool(groups) == bool(everything)
    assert {file.name for group in everything for file in group} >= set(chosen)
    # Whatever is left: few of a size, and none that is worn and of some size.
    left = [file for file in files if file.name not in {n.name for g in everything for n in g}]
    sizes = Counter(
        (file.bucket, round_class(file.live)) for file in left if file.live < FILE_ROWS / 2
    )
    assert all(count < 8 for count in sizes.values())
    assert not [file for file in left if file.rows >= 10_000 and len(file.dead) >= 0.3 * file.rows]


def round_class(rows: int) -> int:
    """Return the power of eight."""
    return (max(1, rows).bit_length() - 1) // 3


@pytest.mark.parametrize("power", range(1, 6))
def test_eight_files_of_a_class_become_one_of_the_next(power: int) -> None:
    """Also where logarithms are not exact: what has grown is not written again at once."""
    least = [a_file(8**power) for _ in range(8)]
    assert [len(group) for group in choose_groups(least, 10**12)] == [8]
    mixed = [a_file(8**power - 1), *(a_file(8**power) for _ in range(7))]
    assert choose_groups(mixed, 10**12) == []


def test_files_of_a_good_size_are_left_alone() -> None:
    assert choose_groups([a_file(FILE_ROWS // 2) for _ in range(100)], 10**12) == []
    assert choose_groups([a_file(FILE_ROWS, dead=range(10)) for _ in range(100)], 10**12) == []


def test_a_worn_file_is_written_anew_alone() -> None:
    worn = a_file(FILE_ROWS, dead=range(FILE_ROWS // 3))
    more_worn = a_file(FILE_ROWS, dead=range(FILE_ROWS // 2))
    assert choose_groups([worn, a_file(FILE_ROWS), more_worn], 10**12) == [(more_worn,), (worn,)]


def test_small_groups_come_first_and_what_is_too_large_has_its_turn_alone() -> None:
    small = [a_file(10) for _ in range(8)]
    large = [a_file(30_000) for _ in range(8)]
    assert choose_groups([*large, *small], 100) == [tuple(small)]
    assert choose_groups(large, 100) == [tuple(large)]
    assert choose_groups([*large, *small], 10**6) == [tuple(small), tuple(large)]


# --- Many rounds ----------------------------------------------------------------------------------


class Rounds:
    """A copy of so many rows, of which random ones change each round; the figures of a real one."""

    def __init__(self, seed: int, rows: int, buckets: int) -> None:
        self.random = Random(seed)
        self.buckets = [BucketId(0, number) for number in range(buckets)]
        self.files: dict[str, LakeFile] = {}
        self.written = self.changed = 0
        for bucket in self.buckets:
            self._write(rows // buckets, bucket)
        self.written = 0

    def _write(self, rows: int, bucket: BucketId) -> None:
        while rows > 0:
            file = a_file(min(rows, FILE_ROWS), bucket=bucket)
            self.files[file.name] = file
            self.written += file.rows
            rows -= file.rows

    def round(self, changed: int, buckets: int) -> None:
        for bucket in self.random.sample(self.buckets, buckets):
            count = changed // buckets
            self._kill(bucket, count)
            self._write(count, bucket)
            self.changed += count

    def _kill(self, bucket: BucketId, count: int) -> None:
        """Let rows die that are spread over the files of a bucket by how many each has."""
        of_bucket = [file for file in self.files.values() if file.bucket == bucket]
        total = sum(file.live for file in of_bucket)
        for file in of_bucket:
            share = min(file.live, round(count * file.live / total))
            dead = len(file.dead) + share
            del self.files[file.name]
            if dead < file.rows:
                now = a_file(file.rows, bucket=bucket, name=file.name, dead=())
                self.files[file.name] = LakeFile(
                    name=now.name, rows=now.rows, size=now.size, dead=BitMap64(range(dead))
                )

    def compact(self, changed: int) -> int:
        groups = choose_groups(self.files.values(), max(2 * changed, 100_000))
        moved = 0
        for group in groups:
            for file in group:
                del self.files[file.name]
            moved += live(group)
            self._write(live(group), group[0].bucket)
        return moved

    @property
    def dead(self) -> int:
        return sum(len(file.dead) for file in self.files.values())

    @property
    def rows(self) -> int:
        return sum(file.live for file in self.files.values())


@pytest.mark.parametrize(
    ("rows", "buckets", "changed", "touched"),
    [
        (1_000_000, 16, 10_000, 16),
        (1_000_000, 4, 1_000, 4),
        (2_000_000, 4, 100, 2),
        (200_000, 64, 640, 16),
        (3_000_000, 2, 100_000, 2),
    ],
)
def test_after_many_rounds_files_are_few_and_rows_were_written_a_few_times(
    rows: int, buckets: int, changed: int, touched: int
) -> None:
    scene = Rounds(14, rows, buckets)
    most_files = most_dead = 0
    for _ in range(150):
        scene.round(changed, touched)
        scene.compact(changed)
        most_files, most_dead = max(most_files, len(scene.files)), max(most_dead, scene.dead)
    classes = math.ceil(math.log(FILE_ROWS, 8))
    assert most_files <= buckets * 7 * classes + rows / (FILE_ROWS / 4)
    # A bucket's small files may be dead for the most part, if they are small.
    assert most_dead <= 0.75 * scene.rows + buckets * 7 * 10_000
    # New rows: once per class, and twice of the whole for what was worn.
    assert scene.written <= (classes + 6) * scene.changed + 100_000
