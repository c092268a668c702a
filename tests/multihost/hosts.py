"""Several hosts on one machine, without root: network, mount and UTS namespaces around a bridge.

A host has an address, a name, a disk of its own (the same path on all of them), and the programs
that were started on it. Nothing touches the machine's own interfaces. Everything ends with the
lab, or with the process that made it (`keeper`).
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.multihost import keeper

REPOSITORY = Path(__file__).parents[2]
BRIDGE = "br0"
_NETWORK = "10.77.0"
_ENTER = ("--user", "--preserve-credentials", "--net", "--mount", "--uts")
# A load ends what it has begun, also when that has to wait for a lock to expire.
_STOP_DEADLINE_S = 150.0


def needs_namespaces() -> None:
    """Skip the test where one may not make hosts, and say why."""
    probe = ["unshare", "-rnmu", "ip", "link", "add", BRIDGE, "type", "bridge"]
    try:
        said = subprocess.run(probe, capture_output=True, text=True, timeout=120, check=False)
    except OSError as exc:
        pytest.skip(f"hosts need unshare (util-linux) and ip (iproute2): {exc}")
    if said.returncode:
        pytest.skip(f"this user may not make namespaces with a bridge: {said.stderr.strip()}")


class Program:
    """A process on a host; its output is in a file."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs, or sleeps."""
        return self._process.poll() is None

    @property
    def code(self) -> int | None:
        """What it ended with, if it has."""
        return self._process.poll()

    def stop(self) -> None:
        """Ask it to end, and wait until it has."""
        self._process.terminate()
        self._process.wait(_STOP_DEADLINE_S)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()
        self._process.wait()

    def last_words(self, count: int = 8) -> str:
        """Return the end of what it has said."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-count:])


class Lab:
    """The namespace that has the bridge, and the hosts around it, by name."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self.directory = directory
        self.mount = directory / "disk"
        self.mount.mkdir(parents=True)
        (directory / "log").mkdir()
        self.names_path = directory / "hosts"
        addresses = {name: f"{_NETWORK}.{number}" for number, name in enumerate(names, 1)}
        lines = [f"{address} {name}\n" for name, address in addresses.items()]
        self.names_path.write_text("127.0.0.1 localhost\n" + "".join(lines))
        self._keeper = subprocess.Popen(
            ["unshare", "-rnmu", sys.executable, "-S", "-E", keeper.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == b"ready\n", "the keeper of the hosts did not start"
        self._started: list[subprocess.Popen[bytes]] = []
        try:
            self.run("ip", "link", "add", BRIDGE, "type", "bridge")
            self.run("ip", "link", "set", BRIDGE, "up")
            self.hosts = {name: Host(self, name, address) for name, address in addresses.items()}
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process that holds the namespace of the bridge."""
        return self._keeper.pid

    def run(self, *command: str) -> None:
        """Run a command where the bridge is."""
        run_in(self.pid, *command)

    def program(self, name: str, command: Sequence[str]) -> Program:
        """Start a program where the bridge is."""
        return self.start(self.pid, name, command, {})

    def start(
        self, pid: int, name: str, command: Sequence[str], variables: Mapping[str, str]
    ) -> Program:
        """Start a program in the namespaces of a process."""
        log_path = self.directory / "log" / f"{name}.log"
        enter = ["nsenter", "-t", str(pid), *_ENTER, f"--wd={REPOSITORY}", "--"]
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [*enter, *command],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        return Program(name, process, log_path)

    def hold(self) -> int:
        """Start a process that is nothing but a place for the namespaces of a host."""
        enter = ["nsenter", "-t", str(self.pid), "--user", "--preserve-credentials", "--"]
        holder = subprocess.Popen(
            [*enter, "unshare", "--net", "--mount", "--uts", "sleep", "infinity"],
            start_new_session=True,
        )
        self._started.append(holder)
        deadline = time.monotonic() + 20
        while not Path(f"/proc/{holder.pid}/cmdline").read_bytes().startswith(b"sleep"):
            assert holder.poll() is None, "the namespaces of a host could not be made"
            assert time.monotonic() < deadline, "the namespaces of a host were not made in time"
            time.sleep(0.002)
        return holder.pid

    def processes(self) -> list[int]:
        """Return all processes of the lab, but for the keeper: those in its user namespace."""
        return keeper.members(self.pid, "user")

    def close(self) -> None:
        """End all that runs on the hosts; what sleeps, too."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        self._keeper.wait()
        for process in self._started:
            process.wait()
        self._keeper.stdout.close()


class Host:
    """One host. Its programs see its own interface, its own disk and its own name."""

    def __init__(self, lab: Lab, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._lab = lab
        self.disk = lab.directory / "disks" / name
        (self.disk / "tmp").mkdir(parents=True)
        self._holder = lab.hold()
        lab.run(
            *("ip", "link", "add", self.plug, "type", "veth"),
            *("peer", "name", "eth0", "netns", str(self._holder)),
        )
        lab.run("ip", "link", "set", self.plug, "master", BRIDGE, "up")
        self.run("hostname", name)
        self.run("mount", "--bind", str(lab.names_path), "/etc/hosts")
        self.run("mount", "--bind", str(self.disk), str(lab.mount))
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    @property
    def plug(self) -> str:
        """The end of its cable that is in the bridge."""
        return f"v-{self.name}"

    def inside(self, *parts: str) -> str:
        """Return the path by which its programs know a file of its disk."""
        return str(self._lab.mount.joinpath(*parts))

    def run(self, *command: str) -> str:
        """Run a command there, to its end, and return what it says."""
        return run_in(self._holder, *command)

    def program(
        self, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> Program:
        """Start a program there."""
        environment = {"TMPDIR": self.inside("tmp"), **(variables or {})}
        return self._lab.start(self._holder, f"{self.name}-{name}", command, environment)

    def processes(self) -> list[int]:
        """Return the processes of this host."""
        return keeper.members(self._holder, "net")

    def pause(self) -> None:
        """Put all of its processes to sleep, as a host that is suspended."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Wake them up."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def command_line(pid: int) -> list[str]:
    """Return the words of a process's command; none of one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def run_in(pid: int, *command: str) -> str:
    """Run a command in the namespaces of a process, and return what it says."""
    said = subprocess.run(
        ["nsenter", "-t", str(pid), *_ENTER, "--", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, f"{' '.join(command)}: {said.stderr.strip()}"
    return said.stdout
