"""What `tallybook doctor` looks at on this machine: versions, Java, ports, disks."""

import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from foundation.errors import ServerNotStarted
from foundation.open_files import limits
from foundation.versions import version_of
from locks.store.embedded_zookeeper import find_java
from merge_engine.bucket.database import FILES_OF_A_BUCKET
from tallybook.commands.checks import Finding, fine, warning, wrong
from tallybook.commands.output import size

OLDEST_PYTHON = (3, 11)
OLDEST_JAVA = 17
_JAVA_DEADLINE_S = 20.0
_LITTLE_FREE, _TOO_LITTLE_FREE = 10 << 30, 1 << 30
_FEW_FILES = 16_384
_PACKAGES = ("tallybook", "pyarrow", "rocksdict", "kazoo", "obstore")


def check_machine(*, ports: Sequence[int], views: Sequence[Path]) -> list[Finding]:
    """Return what was found on this machine."""
    return [
        check_versions(),
        check_java(),
        check_open_files(),
        *map(check_port, ports),
        *(check_disk("disk of the views", directory) for directory in views),
    ]


def check_versions() -> Finding:
    """Return what is installed."""
    python = platform.python_version()
    packages = {name: version_of(name) for name in _PACKAGES}
    spark = version_of("pyspark")
    found = ", ".join(f"{name} {number}" for name, number in packages.items())
    found = f"Python {python}, {found}, pyspark {spark or 'not installed'}"
    missing = [name for name, number in packages.items() if number is None]
    if sys.version_info < OLDEST_PYTHON or missing:
        need = "Python 3.11 or newer" if not missing else ", ".join(missing)
        return wrong("versions", found, f"install {need}")
    if spark is None:
        return warning(
            "versions",
            found,
            "the sink, `tallybook local` and `tier` need it: pip install 'tallybook[spark]'",
        )
    return fine("versions", found)


def check_java() -> Finding:
    """Return which Java there is: Spark and the embedded ZooKeeper run on it."""
    try:
        java = find_java()
        said = subprocess.run(
            [java, "-version"],
            capture_output=True,
            text=True,
            timeout=_JAVA_DEADLINE_S,
            check=False,
        ).stderr
    except (ServerNotStarted, OSError, subprocess.TimeoutExpired) as exc:
        return warning("Java", f"none: {exc}", "only Spark and `tallybook local` need it")
    number = re.search(r'version "(?:1\.)?(\d+)[^"]*"', said)
    if number is None:
        return warning("Java", f"{java} says {said.strip()!r}", "see that it is Java 17 or newer")
    found = f"{number[0].removeprefix('version ').strip(chr(34))} at {java}"
    if int(number[1]) < OLDEST_JAVA:
        return wrong("Java", found, "Java 17 or newer is needed: set JAVA_HOME to one")
    return fine("Java", found)


def check_open_files() -> Finding:
    """Return how many files a server may have open here: it raises its limit to the hard one."""
    _, hard = limits()
    found = f"{hard:,} for a server that is started here"
    if hard < _FEW_FILES:
        return warning(
            "open files",
            found,
            f"for more than {hard // FILES_OF_A_BUCKET // 2:,} buckets on a server raise the hard "
            "limit: LimitNOFILE= of systemd, --ulimit nofile= of Docker, /etc/security/limits.conf",
        )
    return fine("open files", found)


def check_port(port: int) -> Finding:
    """Return whether a server could listen on a port of this machine."""
    what = f"port {port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as exc:
            return wrong(what, f"cannot be listened on: {exc}", "take another, or end what has it")
    return fine(what, "free")


def check_disk(what: str, directory: Path) -> Finding:
    """Return how much room there is."""
    there = next((one for one in (directory, *directory.parents) if one.exists()), directory)
    try:
        usage = shutil.disk_usage(there)
    except OSError as exc:
        return wrong(what, f"{directory}: {exc.strerror}", "see that it can be reached from here")
    found = f"{size(usage.free)} of {size(usage.total)} free at {directory}"
    if usage.free < _TOO_LITTLE_FREE:
        return wrong(
            what, found, "make room: puts are refused when it is full, and nothing is lost"
        )
    if usage.free < _LITTLE_FREE:
        return warning(what, found, "make room before it is full: puts are refused then")
    return fine(what, found)
