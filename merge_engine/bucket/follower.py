"""A bucket that somebody else leads, followed: its view is kept near the end of the log.

It writes nothing to the log and has no term, so it is in nobody's way. Whoever is to lead the
bucket next warms up like this, and then replays its last changes only, not its history.
"""

from collections.abc import Callable
from pathlib import Path

from rocksdict import Cache

from merge_engine.bucket.fair_lock import FairLock
from merge_engine.bucket.log import wall_clock_ms
from merge_engine.bucket.log_and_view import GoOn, LogAndView, ReadSchemas
from merge_engine.bucket.options import BucketOptions
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.storage.objects import ObjectStorage
from merge_engine.working_set.memory import Memory


class Follower:
    """One bucket, followed from `open` until it is closed, or led by `Bucket.led_from`.

    For one thread at a time.
    """

    def __init__(
        self,
        storage: ObjectStorage,
        view_path: Path,
        history: SchemaHistory,
        *,
        identity: str,
        options: BucketOptions | None = None,
        cache: Cache | None = None,
        memory: Memory | None = None,
        clock_ms: Callable[[], int] = wall_clock_ms,
        read_schemas: ReadSchemas | None = None,
        go_on: GoOn = lambda: True,
        gently: bool = False,
    ) -> None:
        """Bring the view up to the end of the log; Closed if `go_on` says no before it is there.

        `gently`: nobody waits for it, and others need the store. The rest as for `Bucket`.
        """
        self.storage = storage
        self.options = options or BucketOptions()
        self.lock = FairLock()
        with self.lock:
            self._inner = LogAndView(
                storage,
                view_path,
                history,
                identity=identity,
                options=self.options,
                cache=cache or self.options.to_cache(),
                memory=memory or self.options.to_memory(),
                lock=self.lock,
                clock_ms=clock_ms,
                read_schemas=read_schemas,
                go_on=go_on,
                gently=gently,
            )

    @property
    def applied(self) -> int:
        """The offset up to which the view has all changes."""
        return self._inner.view.applied

    def follow(self) -> int:
        """Apply what was appended since; return how many segments that were."""
        with self.lock:
            return self._inner.follow()

    def lead(self) -> LogAndView:
        """Take the lead, for the bucket that this becomes; closed if that fails."""
        with self.lock:
            try:
                self._inner.lead()
            except BaseException:
                self._inner.view.close()
                raise
        return self._inner

    def close(self) -> None:
        """Write the view and let go of it: the next one to open it has less to replay."""
        with self.lock:
            self._inner.view.close()
