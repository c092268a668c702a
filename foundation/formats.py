"""Tables of versions: which formats of a thing are read, by what, and which one is written.

Whatever outlives a process says in its bytes of which version of its format it is. The number that
is found there chooses the reader; nothing is guessed from the rest. Each module that stores
something has its byte layout in its docstring, and a `Formats` with a reader for every version.

The next version is added without breaking the last one:

1. Describe its layout beside the one before. Readers that exist, and their layouts, stay as they
   are: an old reader returns what the new one does, with what was not known then filled in.
2. Add its reader to the table, and write it: `current` is its number. Where releases run side by
   side, as servers that are upgraded one by one, and read what each other write, go on writing the
   last version for one more release.
3. Run `tests/fixtures/formats/make.py`, which adds files of the new version; those of the old ones
   are read for ever. A test fails as long as a version in a table has no fixture.

A release that does not have the version in its table refuses it with the error of `reader`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

Reader = TypeVar("Reader")


@dataclass(frozen=True, kw_only=True, eq=False)
class Formats(Generic[Reader]):
    """The versions of one format, by their numbers.

    `name`: of the format, and of the directory of its fixtures. `current`: the version that is
    written. `readers`: what reads each version. `error`: makes the error for any other version.
    """

    name: str
    current: int
    readers: Mapping[int, Reader]
    error: Callable[[str], Exception]

    def __post_init__(self) -> None:
        if self.current not in self.readers:
            raise ValueError(
                f"nothing reads version {self.current} of {self.name}, which is written"
            )
        object.__setattr__(self, "readers", MappingProxyType(dict(self.readers)))

    def reader(self, found: object, what: str, or_else: str = "") -> Reader:
        """Return what reads the version that was found; the error if it is not in the table.

        `what` was found to be of that version: "segment 7". `or_else`: what else can be done about
        it than to use another release.
        """
        # A boolean, or a float, of an equal value is not the number that was written.
        if type(found) is int and found in self.readers:
            return self.readers[found]
        newer = type(found) is int and found > max(self.readers)
        way_out = "a newer release: upgrade" if newer else "another release: use that one"
        raise self.error(
            f"{what} of format {found}, this release reads {_listed(sorted(self.readers))}; it was "
            f"written by {way_out}{or_else}"
        )


def _listed(versions: list[int]) -> str:
    *others, last = map(str, versions)
    return f"{', '.join(others)} and {last}" if others else last
