"""The pages of the documentation, and the world in which their blocks are run.

All pages share one running cluster. Code runs in order, in one namespace and one directory per
page; names of places that a reader would replace (`127.0.0.1:2181`, `/shared/logs`) are replaced by
those of the test. `tb.LocalCluster` and `EmbeddedZooKeeper` are the shared ones. Commands run as
they stand; what cannot be run here (spark-submit to another machine) must have the options that the
page gives it. What is for several hosts is run by `tests/multihost`.
"""

import ast
import inspect
import io
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import tallybook
from locks.store import embedded_zookeeper
from locks.store.embedded_zookeeper import EmbeddedZooKeeper, find_jars, find_java
from server.launch import on_spark
from server.launch.local_cluster import LocalCluster
from tallybook import cli
from tests.support.markdown import BadPage, Block, Page, read_page
from tests.support.zookeeper_server import wait_until

ROOT = Path(__file__).parents[2]
NAMES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "tests/*.md")
    for path in ROOT.glob(pattern)
)
_DEADLINE_S = 60.0
_OF_SPARK_SUBMIT = ("--master", "--conf")


@cache
def page(name: str) -> Page:
    """Return a page by its path below the root of the repository."""
    return read_page(ROOT / name, name)


class World:
    """Where pages run: a cluster, a directory for each page, and Spark for those that use it."""

    def __init__(self, local: LocalCluster, directory: Path, spark: Callable[[], Any]) -> None:
        """`directory` is that of the cluster; `spark` returns a session, the same each time."""
        self._local = local
        self._directory = directory
        self._spark = spark
        self._places = {
            "127.0.0.1:2181": local.address,
            "zookeeper:2181/tallybook": f"{local.address}/secured",
            "/shared/logs": str(directory / "logs"),
            "/shared/lake": str(directory / "lake"),
            "/var/lib/tallybook": "views",
        }

    def run(self, page: Page) -> None:
        """Run all blocks of a page."""
        namespace: dict[str, Any] = {"__name__": "documented"}
        uses_spark = any(re.search(r"\bspark\b", block.text) for block in page.blocks)
        directory = self._directory / "pages" / Path(page.name).stem
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(directory)
                if uses_spark:
                    namespace["spark"] = self._spark()
                    _stand_in(namespace["spark"], directory)
                patch.setattr(tallybook, "LocalCluster", self._shared_cluster)
                patch.setattr(embedded_zookeeper, "EmbeddedZooKeeper", self._shared_zookeeper)
                patch.setattr(on_spark, "run", _planned)
                for block in page.blocks:
                    if block.kind != "text" and not block.hosts:
                        self._run_block(block, namespace, patch)
        finally:
            with self._local.connect() as client:
                for name in client.list_tables():
                    client.drop_table(name, force=True)

    def _run_block(
        self, block: Block, namespace: dict[str, Any], patch: pytest.MonkeyPatch
    ) -> None:
        text = block.text
        for place, here in self._places.items():
            text = text.replace(place, here)
        said = io.StringIO()
        with redirect_stdout(said):
            if block.kind == "sh":
                for words in commands(text):
                    self._run_command(block, words, patch)
            elif block.kind == "zkcli":
                self._run_zkcli(block, text)
            else:  # So that a traceback has the lines of the page.
                exec(compile("\n" * (block.line - 1) + text, block.page, "exec"), namespace)
        if block.kind != "test" and said.getvalue() != (block.prints or ""):
            raise BadPage(
                f"{block.where} says that it prints\n{block.prints}, and prints\n{said.getvalue()}"
            )

    @contextmanager
    def _shared_cluster(self, *arguments: Any, **settings: Any) -> Iterator[LocalCluster]:
        inspect.signature(LocalCluster).bind(*arguments, **settings)
        yield self._local

    def _shared_zookeeper(self, *arguments: Any, **settings: Any) -> "_Running":
        inspect.signature(EmbeddedZooKeeper).bind(*arguments, **settings)
        return _Running(self._local.address)

    def _run_command(self, block: Block, words: Sequence[str], patch: pytest.MonkeyPatch) -> None:
        match list(words):
            case ["export", *settings]:
                for setting in settings:
                    patch.setenv(*setting.split("=", 1))
            case [".", ".venv/bin/activate"]:  # Who reads has another Python than we.
                pass
            case ["python", "-m", module] if module.startswith("examples."):
                _run_example(block, module)
            case ["make", *_]:
                check_command(words)
            case ["spark-submit", *_]:
                check_command(words)
            case ["tallybook", "serve", *options]:
                self._serve(options)
            case ["tallybook", "tier", *_]:
                _tier(block, words)
            case ["tallybook", *rest]:
                said = io.StringIO()
                with redirect_stderr(said):
                    code = cli.main(rest)
                assert code == 0, f"{block.where}: {shlex.join(words)}: {said.getvalue()}"
            case _:
                raise BadPage(f"{block.where}: nobody knows how to run {shlex.join(words)}")

    def _serve(self, options: Sequence[str]) -> None:
        """Run a server until it has joined the cluster, and stop it."""
        told = Path("address")
        command = [sys.executable, "-m", "tallybook", "serve", *options]
        with (
            open("server.log", "wb") as log,
            subprocess.Popen([*command, "--address-file", str(told)], stderr=log) as server,
        ):
            try:
                wait_until(
                    lambda: told.exists() or server.poll() is not None,
                    "the server joins",
                    _DEADLINE_S,
                )
                server.send_signal(signal.SIGTERM)
                assert server.wait(_DEADLINE_S) == 0, Path("server.log").read_text()
                assert told.exists()
            finally:
                server.kill()

    def _run_zkcli(self, block: Block, text: str) -> None:
        """Give the lines to ZooKeeper's own command line, which says what it did not like."""
        done = subprocess.run(
            [
                *(find_java(), "-XX:TieredStopAtLevel=1", "-cp", find_jars()),
                *("org.apache.zookeeper.ZooKeeperMain", "-server", self._local.address),
            ],
            input=f"{text}quit\n",
            capture_output=True,
            text=True,
            check=False,
            timeout=_DEADLINE_S,
        )
        refused = re.findall(
            r"(?i).*(?:error|exception|invalid|usage|not exist|is not valid).*", done.stdout
        )
        assert (done.returncode, refused) == (0, []), f"{block.where}: {done.stdout}{done.stderr}"


def _run_example(block: Block, module: str) -> None:
    """Run an example in a process of its own, which may be one that kills itself."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=_DEADLINE_S,
    )
    assert done.returncode in (0, -signal.SIGKILL), f"{block.where}: {done.stderr}"
    print(done.stdout, end="")


def _tier(block: Block, words: Sequence[str]) -> None:
    """Run the command here, with the session that there is, which goes on; times are not compared.

    It takes signals for itself, which are given back.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415

    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers = [signal.getsignal(number) for number in numbers]
    said = io.StringIO()
    try:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
            patch.setattr(SparkSession, "stop", lambda _: None)
            code = cli.main(list(words[1:]))
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
    assert code == 0, f"{block.where}: {shlex.join(words)}: {said.getvalue()}"


@dataclass(frozen=True)
class _Running:
    """In the place of a ZooKeeper that a page starts: one that runs already, and goes on to."""

    address: str

    def start(self) -> "_Running":
        """Return at once: it runs."""
        return self

    def stop(self) -> None:
        """Others need it."""


class _Planned:
    """In the place of servers on Spark: they would have been started."""

    def __enter__(self) -> "_Planned":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait(self) -> bool:
        """Return at once: nothing runs."""
        return True


def _stand_in(spark: Any, directory: Path) -> None:
    """Let Spark look here for relative paths: its JVM stays where it was started, by any test.

    Inputs are looked up by a file system that remembers its directory, checkpoints by one that asks
    the JVM anew each time.
    """
    spark._jvm.java.lang.System.setProperty("user.dir", str(directory))
    hadoop = spark._jvm.org.apache.hadoop.fs
    files = hadoop.FileSystem.get(spark._jsc.hadoopConfiguration())
    files.setWorkingDirectory(hadoop.Path(str(directory)))


def _planned(spark: Any, **arguments: Any) -> _Planned:
    """Check what `server.launch.on_spark.run` is asked for, and run nothing."""
    assert hasattr(spark, "sparkContext")
    on_spark.plan(**arguments)
    return _Planned()


# --- Commands -------------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """Return the commands of a shell block, as words; comments are left out."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def check_command(words: Sequence[str]) -> None:
    """Raise BadPage unless there is such a command, and it has these options."""
    match list(words):
        case ["make", *targets]:
            done = subprocess.run(
                ["make", "--dry-run", *targets],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
                timeout=_DEADLINE_S,
            )
            if done.returncode:
                raise BadPage(f"{shlex.join(words)}: {done.stderr.strip()}")
        case ["tallybook", *rest]:
            path = _command_of(rest)
            _check_options(words, rest, options_of(*path))
        case ["spark-submit", *rest]:
            [script] = [word for word in rest if word.endswith(".py")]
            at = rest.index(script)
            _check_options(words, rest[:at], _OF_SPARK_SUBMIT)
            if not (ROOT / "tallybook" / Path(script).name).exists():
                raise BadPage(f"{shlex.join(words)}: there is no {script}")
            check_command(["tallybook", *rest[at + 1 :]])
        case _:
            raise BadPage(f"there is no command {shlex.join(words)}")


def _check_options(words: Sequence[str], given: Sequence[str], known: Sequence[str]) -> None:
    for word in given:
        option = word.partition("=")[0]
        if option.startswith("--") and option not in known:
            raise BadPage(f"{shlex.join(words)}: there is no option {option}")


def _command_of(words: Sequence[str]) -> list[str]:
    """Return the names of the command and of what it is to do, such as `locks release`."""
    first = list(words[:1])
    return [*first, *words[1:2]] if first and tuple(first) in _groups() else first


@cache
def options_of(*command: str) -> Sequence[str]:
    """Return the options of a command of `tallybook`, by its own help; BadPage if it is none."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "300")  # An option is not to be cut.
        code = cli.main([*command, "--help"])
    if code:
        raise BadPage(f"tallybook {shlex.join(command)}: {said.getvalue().strip()}")
    return sorted(set(re.findall(r"--[a-z][a-z-]*", said.getvalue())))


def all_options() -> set[str]:
    """Return the options of all commands of `tallybook`."""
    return {option for command in all_commands() for option in options_of(*command)}


@cache
def all_commands() -> Sequence[tuple[str, ...]]:
    """Return all commands of `tallybook`, and itself, as words."""
    return [(), *_below(())]


@cache
def _groups() -> set[tuple[str, ...]]:
    return {command[:-1] for command in all_commands() if len(command) == 2}


def _below(command: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the commands that the help of one lists, and those below them."""
    found: Any = get_command(cli.app)
    for word in command:
        found = found.commands[word]
    for name in getattr(found, "commands", ()):
        yield from ((*command, name), *_below((*command, name)))


# --- Values in tables -----------------------------------------------------------------------------

_BYTES = {"MiB": 1 << 20, "GiB": 1 << 30}
_SECONDS = {"s": 1, "min": 60, "h": 3600}


def values_in(cell: str, *, milliseconds: bool = False) -> list[Any]:
    """Return the values that a cell of defaults gives, in order.

    `none`, code (a literal of Python, or else a text), or numbers with their units among words.
    """
    if cell == "none":
        return [None]
    if codes := re.findall(r"`([^`]+)`", cell):
        return [_literal(code) for code in codes]
    found = re.findall(r"(\d[\d,.]*)(?: ([A-Za-z]+))?", cell)
    units = {**_BYTES, **{unit: s * (1000 if milliseconds else 1) for unit, s in _SECONDS.items()}}
    return [float(digits.rstrip(",.").replace(",", "")) * units.get(u, 1) for digits, u in found]


def _literal(code: str) -> Any:
    try:
        return ast.literal_eval(code)
    except (SyntaxError, ValueError):
        return code
