"""What the test of the documentation would notice: pages that are wrong are refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.documented import World, check_command, commands, options_of, values_in
from tests.support.markdown import BadPage, Block, parse

PAGE = """\
# A page, with `code`

```python
print(1)
```

prints

```text
1
```

<!-- test:
assert True
-->

- See [there](other.md#a-heading) for `tallybook
  status`.

| option | default |
|---|---|
| `--host` | `here` |

```text
a picture
```

```sh on spark client
date
```
"""


def test_a_page_is_its_blocks_in_order_and_the_text_around_them() -> None:
    page = parse(PAGE, "page.md")
    assert page.blocks == [
        Block(page="page.md", line=4, kind="python", text="print(1)\n", prints="1\n"),
        Block(page="page.md", line=14, kind="test", text="assert True\n"),
        Block(page="page.md", line=25, kind="text", text="a picture\n"),
        Block(page="page.md", line=29, kind="sh", text="date\n", hosts=("spark", "client")),
    ]
    assert [*page.codes()][:2] == [(1, "code"), (17, "tallybook   status")]
    assert [*page.links()] == [(17, "other.md#a-heading")]
    assert page.anchors() == {"a-page-with-code"}
    assert page.table("option") == [{"option": "`--host`", "default": "`here`"}]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("```\nls\n```\n", "page.md:2 begins a block of ''"),
        ("```bash\nls\n```\n", "begins a block of 'bash'"),
        ("```test\nx = 1\n```\n", "begins a block of 'test'"),
        ("```python\nx = 1\n", "has no end"),
        ("<!-- test:\nx = 1\n", "has no end"),
        ("~~~python\nx = 1\n~~~\n", "begins with ``` at the margin"),
        ("- item\n  ```python\n  x = 1\n  ```\n", "begins with ``` at the margin"),
        ("1. item\n   ```python\n   x = 1\n   ```\n", "begins with ``` at the margin"),
        ("text\n\n    x = 1\n", "begins with ``` at the margin"),
    ],
)
def test_a_block_that_nobody_would_run_is_refused(text: str, why: str) -> None:
    with pytest.raises(BadPage, match=why):
        parse(text, "page.md")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what runs a block that needs no cluster."""
    monkeypatch.chdir(tmp_path)
    local: Any = SimpleNamespace(address="127.0.0.1:1")
    world = World(local, tmp_path, lambda: None)

    def run(text: str, kind: str = "python", prints: str | None = None) -> None:
        block = Block(page="page.md", line=7, kind=kind, text=text, prints=prints)
        world._run_block(block, {}, monkeypatch)

    return run


def test_code_that_prints_something_else_than_the_page_says_is_refused(run: Any) -> None:
    run("print(1)\n", prints="1\n")
    run("x = 1\n")
    for prints in (None, "2\n"):
        with pytest.raises(BadPage, match=r"page.md:7 says that it prints"):
            run("print(1)\n", prints=prints)
    with pytest.raises(BadPage, match=r"page.md:7 says that it prints"):
        run("x = 1\n", prints="1\n")
    run("print(1)\n", kind="test")
    with pytest.raises(ZeroDivisionError) as failed:
        run("x = 1\nx / 0\n")
    assert failed.traceback[-1].lineno == 7


def test_places_are_replaced_by_those_of_the_test(run: Any) -> None:
    run("print('127.0.0.1:2181')\n", prints="127.0.0.1:1\n")


def test_commands_that_nobody_knows_or_that_fail_are_refused(run: Any) -> None:
    with pytest.raises(BadPage, match="nobody knows how to run rm -r x"):
        run("rm -r x\n", kind="sh")
    with pytest.raises(AssertionError, match=r"tallybook status: .*address is missing"):
        run("tallybook status\n", kind="sh")
    with pytest.raises(AssertionError, match="No such option: --no-such-option"):
        run("tallybook status --no-such-option\n", kind="sh")


@pytest.mark.parametrize(
    "words",
    [
        "make dmeo",
        "tallybook stat",
        "tallybook locks steal",
        "tallybook serve --view x",
        "tallybook locks release customers etl-1 --forced",
        "spark-submit --mastr x path/to/tallybook/__main__.py serve",
        "spark-submit path/to/tallybook/__main__.py serve --on-sparks",
        "spark-submit path/to/tallybook/main.py serve",
        "rm -r x",
    ],
)
def test_commands_and_options_that_there_are_not_are_refused(words: str) -> None:
    with pytest.raises(BadPage):
        check_command(words.split())


def test_commands_and_options_that_there_are_pass() -> None:
    check_command(["make", "demo", "test"])
    check_command(["tallybook", "locks", "release", "customers", "etl-1", "--force"])
    submit = ["spark-submit", "--master", "m", "there/tallybook/__main__.py"]
    check_command([*submit, "serve", "--servers=4"])
    assert "--force" in options_of("locks", "release")


def test_a_shell_block_is_its_commands() -> None:
    text = "# first\nexport A=1\ntallybook serve \\\n  --host 'my host'  # here\n\n"
    assert commands(text) == [["export", "A=1"], ["tallybook", "serve", "--host", "my host"]]


@pytest.mark.parametrize(
    ("cell", "values"),
    [
        ("none", [None]),
        ('`"undo"`', ["undo"]),
        ("`{}`", [{}]),
        ("`127.0.0.1`", ["127.0.0.1"]),
        ("1,000,000 rows, 64 MiB a put", [1_000_000, 64 << 20]),
        ("8 and 200 scanners at a time", [8, 200]),
        ("10 min", [600]),
    ],
)
def test_defaults_are_read_as_people_write_them(cell: str, values: list[Any]) -> None:
    assert values_in(cell) == values
    assert values_in("10 min", milliseconds=True) == [600_000]
