"""Runs a command for as long as whoever started it lives: `child_guardian.py LOG COMMAND`.

The starter holds the other end of our standard input. Whatever it writes there asks the command to
end; when it closes it or ends itself, for whatever reason, SIGKILL included, the command is killed.
Prints the command's process id first. Only the standard library: it is started as a file, without
the packages around it.
"""

import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    """Run the command to its end and return its exit code; as shells do, 128 more than a signal."""
    # A Ctrl-C is the starter's to handle. The command inherits this: a ZooKeeper that went at once
    # would leave the servers waiting for it when the starter stops them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(sys.argv[1], "ab") as log:
        try:
            child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        except OSError as exc:  # The starter sees that there is no process id.
            log.write(f"cannot run {sys.argv[2]}: {exc.strerror}\n".encode())
            return 1
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    print(child.pid, flush=True)

    def obey() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            child.terminate()
        child.kill()

    threading.Thread(target=obey, daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
