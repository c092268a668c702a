"""Stands in for systemd on a host of a bed, whose hosts have none: `systemctl` of pages.

    systemctl enable --now FILE | restart NAME | kill --signal=SIGNAL NAME

Of a unit it knows ExecStart, Environment, EnvironmentFile, Restart and RestartSec. Each unit has a
process that runs its command, and runs it again; files about it are in TMPDIR, the host's own.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

_PLACE = Path(os.environ["TMPDIR"], "units")


class Unit:
    """A unit, by its file."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        lines = [line.partition("=") for line in path.read_text().splitlines() if "=" in line]
        self._settings = [(name, value) for name, _, value in lines]

    def last(self, name: str, default: str) -> str:
        """Return what a setting is set to last."""
        return [default, *self._all(name)][-1]

    def environment(self) -> dict[str, str]:
        """Return the variables that the unit sets."""
        lines = [line for value in self._all("Environment") for line in shlex.split(value)]
        for path in self._all("EnvironmentFile"):
            lines += Path(path).read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def restarts_after(self, code: int) -> bool:
        """Whether it is to be started again when it ends like this by itself."""
        policy = self.last("Restart", "no")
        return policy == "always" or (policy == "on-failure" and code != 0)

    def _all(self, name: str) -> list[str]:
        return [value for key, value in self._settings if key == name]


def look_after(unit: Unit) -> None:
    """Run the unit's command until SIGTERM, again when it ends; SIGHUP restarts it."""
    asked: set[int] = set()
    child: subprocess.Popen[bytes] | None = None

    def ask(number: int, _: object) -> None:
        asked.add(number)
        if child is not None:
            child.terminate()

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, ask)
    while signal.SIGTERM not in asked:
        asked.clear()
        environment = {**os.environ, **unit.environment()}
        child = subprocess.Popen(shlex.split(unit.last("ExecStart", "")), env=environment)
        _file(unit.name, "child").write_text(str(child.pid))
        code = child.wait()
        print(f"{unit.name} ended with {code}", flush=True)
        if not asked and unit.restarts_after(code):
            time.sleep(float(unit.last("RestartSec", "0.1")))
        else:
            while not asked:
                signal.pause()


def _file(name: str, what: str) -> Path:
    return _PLACE / f"{name}.{what}"


def _pid(name: str, what: str) -> int:
    return int(_file(name, what).read_text())


def main(words: list[str]) -> None:
    """Do what a command says."""
    _PLACE.mkdir(exist_ok=True)
    match words:
        case ["enable", "--now", path]:
            name = Path(path).stem
            with _file(name, "log").open("ab") as log:
                command = [sys.executable, __file__, "look-after", path]
                keeper = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            _file(name, "keeper").write_text(str(keeper.pid))
        case ["look-after", path]:
            look_after(Unit(Path(path)))
        case ["restart", name]:
            os.kill(_pid(name, "keeper"), signal.SIGHUP)
        case ["kill", signal_option, name]:
            number = signal.Signals[f"SIG{signal_option.removeprefix('--signal=')}"]
            os.kill(_pid(name, "child"), number)
        case _:
            sys.exit(f"systemctl of a bed does not know {shlex.join(words)}")


if __name__ == "__main__":
    main(sys.argv[1:])
