"""Whether the log store can be used, found out before a server joins, by doing what leaders do.

A server that joins is given buckets. If it cannot write their logs, nobody serves them, while the
cluster looks healthy. So it creates an object, reads it back, and tries to create it again, which
has to fail: that is what keeps two leaders of a bucket apart.

The object is below a prefix that no table has: their names do not begin with a dot. One that a
killed server leaves there is never looked at again.
"""

import logging
import threading
import uuid
from contextlib import suppress

from foundation.errors import AlreadyExists, InvalidInput, StorageUnavailable, TallybookError
from merge_engine.storage.environment import looked_at
from merge_engine.storage.objects import ObjectStorage, local_directory

logger = logging.getLogger(__name__)

PROBES = ".probes"
_DATA = b"A tablet server tries whether it can write here. It may be deleted."
_DEADLINE_S = 30.0


class _Probe:
    """One try. `doing` is what it is at, or what failed."""

    def __init__(self, storage: ObjectStorage) -> None:
        self._storage = storage
        self.name = uuid.uuid4().hex
        self.doing = "creating an object"
        self.error: Exception | None = None

    def run(self) -> None:
        """Try, and keep the error."""
        try:
            # Nobody else has the name. The client of a store sends what was not answered again.
            with suppress(AlreadyExists):
                self._storage.create(self.name, _DATA)
            try:
                self._look()
            finally:
                self._delete()
        except Exception as exc:  # Whatever it is, it keeps the server from working.
            self.error = exc

    def _look(self) -> None:
        self.doing = "reading it back"
        if self._storage.read(self.name) != _DATA:
            raise StorageUnavailable("it has other bytes")
        self.doing = "trying to create it again"
        try:
            self._storage.create(self.name, _DATA)
        except AlreadyExists:
            return
        raise InvalidInput(
            "it created an object that was there already; without put-if-absent two leaders of a "
            "bucket would write one log: use a store that has it"
        )

    def _delete(self) -> None:
        try:
            self._storage.delete([self.name])
        except TallybookError as exc:
            logger.warning("a probe stays in the log store: %s", exc)


def check_log_store(
    storage: ObjectStorage, location: str, *, deadline_s: float = _DEADLINE_S
) -> None:
    """Raise StorageUnavailable unless objects can be created there, once, and read.

    InvalidInput if they can be created twice. obstore tries for minutes: it is left alone then.
    """
    probe = _Probe(storage.child(PROBES))
    thread = threading.Thread(target=probe.run, name="tallybook-probe", daemon=True)
    thread.start()
    thread.join(deadline_s)
    error = probe.error
    if thread.is_alive():
        error = StorageUnavailable(f"no answer within {deadline_s:g} s")
    if error is None:
        return
    kind = InvalidInput if isinstance(error, InvalidInput) else StorageUnavailable
    # Without the name, which is never the same: so it can be told whether it is still the same.
    why = (str(error) or repr(error)).replace(probe.name, "probe")
    raise kind(
        f"the log store at {location} cannot be used: {probe.doing} failed: {why}. "
        f"{_way_out(location)}"
    ) from error


def _way_out(location: str) -> str:
    if local_directory(location) is not None:
        return "See that it is a directory that all servers share, and that this one may write to"
    return f"See that it is there, and that this server may write to it: {looked_at(location)}"
