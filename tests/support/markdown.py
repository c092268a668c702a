"""Pages of Markdown, as tests read them: blocks, code in the text, tables, headings, links.

A fenced block has an info string that says what it is. `python`, `sh` and `zkcli` are run; `sh on
HOSTS` is, too, by `tests/multihost`; `text` is for people only. If the line between a block and a
`text` block begins with "prints", the second is what the first prints. A comment
`<!-- test: ... -->` is Python that readers do not see: what the next block needs, or whether the
last one did what the page says.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

RUNNABLE = ("python", "sh", "zkcli", "test")
KINDS = (*RUNNABLE, "text")

_FENCE = "```"
_ON = "sh on "
_HIDDEN = "<!-- test:"
_PRINTS = "prints"


class BadPage(AssertionError):
    """A page that cannot be understood; the message says where and why."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of a page: `line` is that of its first line of text, `prints` what it should print.

    A `test` block is one that readers do not see. `hosts`: where a `sh` block is run, if not here.
    """

    page: str
    line: int
    kind: str
    text: str
    prints: str | None = None
    hosts: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The page and the line, for people."""
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page: its blocks in order, and `prose`, all of its lines that are in no block."""

    name: str
    blocks: Sequence[Block]
    prose: Sequence[tuple[int, str]]

    @property
    def runs(self) -> bool:
        """Whether there is anything on the page to run."""
        return any(block.kind in RUNNABLE for block in self.blocks)

    def codes(self) -> Iterator[tuple[int, str]]:
        """Yield what stands between backticks in the text, with the line where it begins."""
        whole = "\n".join(text for _, text in self.prose)
        for found in re.finditer(r"`([^`]+)`", whole):
            line, _ = self.prose[whole.count("\n", 0, found.start())]
            yield line, found[1].replace("\n", " ")

    def tables(self) -> Iterator[list[dict[str, str]]]:
        """Yield the tables, each as its rows by the headings of its columns."""
        rows: list[list[str]] = []
        for _, text in (*self.prose, (0, "")):
            if text.startswith("|"):
                cells = re.split(r"(?<!\\)\|", text.strip().strip("|"))
                rows.append([cell.replace("\\|", "|").strip() for cell in cells])
            elif rows:
                head, _, *body = rows
                yield [dict(zip(head, cells, strict=True)) for cells in body]
                rows = []

    def table(self, first_heading: str) -> list[dict[str, str]]:
        """Return the one table whose first column has this heading."""
        found = [rows for rows in self.tables() if first_heading in list(rows[0])[:1]]
        if len(found) != 1:
            raise BadPage(f"{self.name} has {len(found)} tables of '{first_heading}'")
        return found[0]

    def anchors(self) -> set[str]:
        """Return what links can point to: the headings, as GitHub names them."""
        headings = [text.lstrip("#").strip() for _, text in self.prose if text.startswith("#")]
        return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}

    def links(self) -> Iterator[tuple[int, str]]:
        """Yield the targets of links, with their lines."""
        for line, text in self.prose:
            for target in re.findall(r"\]\(([^)\s]+)\)", text):
                yield line, target


def read_page(path: Path, name: str) -> Page:
    """Return a page; BadPage if a block has no kind that is known, or no end."""
    return parse(path.read_text(), name)


def parse(text: str, name: str) -> Page:
    """Return the page of this text."""
    blocks: list[Block] = []
    prose: list[tuple[int, str]] = []
    between: list[str] = []
    lines = enumerate(text.splitlines(), 1)
    for number, line in lines:
        _check_margin(line, f"{name}:{number}", after_blank=not prose or not prose[-1][1])
        if line.startswith(_FENCE):
            kind = line.removeprefix(_FENCE).strip()
            body = _until(lines, _FENCE, f"{name}:{number}")
            hosts: tuple[str, ...] = ()
            if kind.startswith(_ON):
                kind, hosts = "sh", tuple(kind.removeprefix(_ON).split())
            block = Block(page=name, line=number + 1, kind=kind, text=body, hosts=hosts)
            if kind not in KINDS or kind == "test":
                raise BadPage(
                    f"{block.where} begins a block of '{kind}'; say one of {', '.join(KINDS[:3])} "
                    "after its first fence, which are run, or text, which is not"
                )
            if kind == "text" and _says_prints(between) and blocks and blocks[-1].kind != "text":
                blocks[-1] = _printing(blocks[-1], body)
            else:
                blocks.append(block)
            between = []
        elif line.startswith(_HIDDEN):
            body = _until(lines, "-->", f"{name}:{number}")
            blocks.append(Block(page=name, line=number + 1, kind="test", text=body))
            between = []
        else:
            prose.append((number, line))
            between += [line.strip()] if line.strip() else []
    return Page(name=name, blocks=blocks, prose=prose)


def _says_prints(between: Sequence[str]) -> bool:
    """Whether the text between two blocks says that the second is the output of the first."""
    return len(between) == 1 and between[0].partition(",")[0] == _PRINTS


def _check_margin(line: str, where: str, *, after_blank: bool) -> None:
    """Markdown has other ways to write a block. Those would not be seen here, and so not be run."""
    fenced = line.lstrip().startswith((_FENCE, "~~~")) and not line.startswith(_FENCE)
    if fenced or (line.startswith("    ") and after_blank):
        raise BadPage(f"{where}: a block begins with {_FENCE} at the margin")


def _until(lines: Iterator[tuple[int, str]], end: str, where: str) -> str:
    body: list[str] = []
    for _, line in lines:
        if line.rstrip() == end:
            return "".join(f"{one}\n" for one in body)
        body.append(line)
    raise BadPage(f"the block that begins at {where} has no end")


def _printing(block: Block, prints: str) -> Block:
    return replace(block, prints=prints)
