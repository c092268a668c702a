"""The two Spark jobs of the demo as processes: started, followed, and ended whatever happens."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_LOOK_S = 0.1
_END_DEADLINE_S = 10.0


class DemoFailed(Exception):
    """Something that the demo promises did not happen; the message says what."""


class Job:
    """A Spark driver in a process group of its own: Python, its JVM, and whatever they start."""

    def __init__(self, name: str, arguments: Sequence[str], directory: Path, files: int) -> None:
        self.name = name
        self.files = files
        self.committed = -1
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self._temporary = directory / "tmp"
        self._temporary.mkdir(exist_ok=True)
        self._command = [sys.executable, "-m", "examples.wide_table_job", name, *arguments]
        self._log_path = directory / f"{name}.log"
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def start(self, **environment: str) -> None:
        """Start it, with these variables on top of our environment."""
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=_ROOT,
                env={**os.environ, "TMPDIR": str(self._temporary), **environment},
                stdin=subprocess.PIPE,  # It ends when this is closed, so it never outlives us.
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, args=[self._process], daemon=True)
        self._reader.start()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):  # Java may have something to say, too.
                self.messages.put(json.loads(line))

    @property
    def running(self) -> bool:
        """Whether its process runs; once it does not, all that it has said is in `messages`."""
        if self._process is None:
            return False
        if self._process.poll() is None:
            return True
        self.end()
        return False

    @property
    def exit_code(self) -> int | None:
        """How it ended; minus the signal's number if by a signal."""
        return None if self._process is None else self._process.returncode

    @property
    def log(self) -> str:
        """The end of what it wrote to standard error."""
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-20:])

    def end(self) -> None:
        """Kill what is left of it, the JVM included. Ending twice is fine."""
        if self._process is None or self._reader is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(_END_DEADLINE_S)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()


def follow(
    jobs: Sequence[Job],
    show: Callable[[Job, dict[str, Any]], None],
    until: Callable[[], bool],
    *,
    may_die: Job | None = None,
    deadline_s: float = 90.0,
) -> None:
    """Show what the jobs say until something is true; DemoFailed if a job fails before that."""
    deadline = time.monotonic() + deadline_s
    done = False
    while not done:
        # First this, then the messages: all that was said before it became true is shown.
        done = until()
        for job in jobs:
            if not job.running and job is not may_die and job.exit_code:
                raise DemoFailed(f"the job {job.name} ended with {job.exit_code}:\n{job.log}")
            while not job.messages.empty():
                message = job.messages.get()
                job.committed = message["batch"]
                show(job, message)
        if not done and time.monotonic() > deadline:
            raise DemoFailed(f"waited for {deadline_s:g} s in vain:\n{jobs[0].log}")
        time.sleep(0 if done else _LOOK_S)
