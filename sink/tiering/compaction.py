"""Which files of a copy are written anew, so that neither their number nor dead rows grow.

Files of a bucket are in classes by how many rows they have: each class has eight times as many as
the one before. Eight files of a class become one of the next, so a row is written anew about once
per class, however many rounds there are. A file of which a good part is dead is written anew alone.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

from sink.lake.files import FILE_ROWS, LARGE_BYTES
from sink.lake.state import LakeFile

_FAN = 8
# Of the rows of a file, so many are dead before it is worth to write it anew.
_WORN = 0.3
# Smaller ones are merged with others in their time.
_WORTH_ROWS = 10_000

Group = tuple[LakeFile, ...]


def choose_groups(files: Iterable[LakeFile], most_rows: int) -> list[Group]:
    """Return which files to merge, each group of one bucket: the most worthwhile first.

    No more than so many rows in all; but one group at least, or a large one would never have its
    turn.
    """
    worn: list[Group] = []
    classes: dict[object, list[LakeFile]] = defaultdict(list)
    for file in files:
        if file.rows >= _WORTH_ROWS and len(file.dead) >= _WORN * file.rows:
            worn.append((file,))
        elif file.live < FILE_ROWS / 2 and file.size < LARGE_BYTES:
            classes[file.bucket, _class(file)].append(file)
    full = [
        tuple(of_class[start : start + _FAN])
        for of_class in classes.values()
        for start in range(0, len(of_class) - _FAN + 1, _FAN)
    ]
    worn.sort(key=lambda group: -len(group[0].dead) / group[0].rows)
    full.sort(key=_rows)
    chosen: list[Group] = []
    left = most_rows
    for group in (*full, *worn):
        if _rows(group) <= left or not chosen:
            chosen.append(group)
            left -= _rows(group)
    return chosen


def _class(file: LakeFile) -> int:
    return int(math.log(max(1, file.live), _FAN))


def _rows(group: Group) -> int:
    return sum(file.live for file in group)
