"""PostgreSQL, where it is installed: a server of its own, upsert of batches folded before.

A batch goes by binary COPY into a temporary table, and by `INSERT ... ON CONFLICT DO UPDATE` into
the table, in one transaction, whose commit is synced. The table's pages leave room for new versions
of rows (`fillfactor`), so that indexes need no update.
"""

import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.peers.peer import NotInstalled, Work, folded
from locks.store.child_process import GuardedProcess

_SETTINGS = {
    "listen_addresses": "",
    "shared_buffers": "1GB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "15min",
    "wal_compression": "lz4",
    "jit": "off",
}
_UPSERT = """
    INSERT INTO rows SELECT * FROM batch ON CONFLICT (key) DO UPDATE SET
        total = rows.total + excluded.total,
        highest = greatest(rows.highest, excluded.highest),
        events = rows.events + excluded.events
"""
_USER = "postgres"
_START_DEADLINE_S = 60.0
_INSTALLED = "/usr/lib/postgresql/*/bin"


class PostgreSQL:
    """A server that listens on a socket in its own directory, and one connection to it."""

    def __init__(self, directory: Path, _: Work | None = None) -> None:
        try:
            from adbc_driver_postgresql import dbapi  # noqa: PLC0415
        except ImportError as exc:
            raise NotInstalled(
                "adbc-driver-postgresql is not installed (pip install 'tallybook[bench]')"
            ) from exc
        self._server = _Server(directory)
        try:
            self._connection: Any = dbapi.connect(self._server.address)
            self._execute(
                "CREATE TABLE rows (key BIGINT, total BIGINT, highest DOUBLE PRECISION, "
                "events BIGINT) WITH (fillfactor = 50)"
            )
        except BaseException:
            self._server.stop()
            raise

    def load(self, events: Iterator[pa.RecordBatch]) -> None:
        """Copy, and only then make the index."""
        for batch in events:
            self._copy("rows", folded(batch), temporary=False)
            self._connection.commit()
        self._execute("ALTER TABLE rows ADD PRIMARY KEY (key)", "ANALYZE rows")

    def upsert(self, events: pa.RecordBatch) -> None:
        """Fold a batch, copy it beside the table, and merge it."""
        self._copy("batch", folded(events), temporary=True)
        self._execute(_UPSERT, "DROP TABLE batch")

    def settle(self) -> None:
        """Checkpoints and vacuum come when they like."""

    def read(self, keys: pa.Array) -> pa.Table:
        """Join the rows with the keys."""
        self._copy("wanted", pa.table({"key": keys}), temporary=True)
        with self._connection.cursor() as cursor:
            cursor.execute("SELECT rows.* FROM rows WHERE key IN (SELECT key FROM wanted)")
            found = cursor.fetch_arrow_table()
        self._connection.rollback()
        return found

    def close(self) -> None:
        """Stop the server."""
        self._connection.close()
        self._server.stop()

    def _execute(self, *statements: str) -> None:
        """Run statements, and commit them with what was copied before."""
        with self._connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
        self._connection.commit()

    def _copy(self, name: str, rows: pa.Table, *, temporary: bool) -> None:
        with self._connection.cursor() as cursor:
            mode = "create" if temporary else "append"
            cursor.adbc_ingest(name, rows, mode=mode, temporary=temporary)


class _Server:
    """A PostgreSQL server in a directory; by the user `postgres` where we are root, as it asks."""

    def __init__(self, directory: Path) -> None:
        found = shutil.which("initdb") or next(iter(sorted(glob(f"{_INSTALLED}/initdb"))), None)
        if found is None:
            raise NotInstalled("PostgreSQL is not installed: there is no initdb")
        programs = Path(found).resolve().parent
        user = [] if os.geteuid() else _another_user()
        directory.mkdir(parents=True)
        if user:  # Who must be able to get there.
            for above in (directory.parent, directory.parent.parent):
                above.chmod(above.stat().st_mode | 0o011)
            shutil.chown(directory, _USER)
        data = str(directory / "data")
        run = [*user, str(programs / "initdb"), "-D", data, "--username=bench", "--auth=trust"]
        subprocess.run(
            [*run, "--no-locale", "--encoding=UTF8"],
            cwd=directory,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        settings = [word for item in _SETTINGS.items() for word in ("-c", "=".join(item))]
        # The socket is in the directory of the data, where the server stands.
        run = [*user, str(programs / "postgres"), "-D", data, "-k", ".", *settings]
        self._process = GuardedProcess(run, directory / "server.log")
        self.address = f"postgresql://bench@/postgres?host={data}"
        self._wait([str(programs / "pg_isready"), "-q", "-d", self.address])

    def _wait(self, ready: Sequence[str]) -> None:
        deadline = time.monotonic() + _START_DEADLINE_S
        while subprocess.run(ready, check=False).returncode:
            if time.monotonic() > deadline or not self._process.alive:
                self.stop()
                raise NotInstalled("PostgreSQL is there, but it did not start")
            time.sleep(0.05)

    def stop(self) -> None:
        """End it."""
        self._process.end(politely=True)


def _another_user() -> list[str]:
    """Return what to put before a command so that another user runs it: the server is not root."""
    try:
        pwd.getpwnam(_USER)
    except KeyError:
        raise NotInstalled(f"PostgreSQL does not run as root, and there is no {_USER}") from None
    if shutil.which("setpriv") is None:
        raise NotInstalled("PostgreSQL does not run as root, and there is no setpriv")
    return ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups"]
