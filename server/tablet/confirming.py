"""Whether this server still leads a bucket: for who reads what is committed, without writing.

The log tells: the first segment of another leader would stand at its end. That takes the store. If
the store does not answer, ZooKeeper tells it, too, of a table with column locks. Whoever leads in
the log after us, while the bucket's node is ours, was given that node before us, and has opened the
bucket late: its session was over when we took the node, or it would have it still. Nothing that it
answers is ever committed, since a commit checks in its transaction the sessions of those that
answered. So what is committed while the node is ours, and was all the time since we opened the
bucket, is in our log. One that was given up in between was closed before that: whether it is open
is looked at last. Without column locks a put counts as soon as it is in the log, whoever wrote it
there: then it is the log that has to be asked.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from foundation.errors import NotLeader, StorageUnavailable
from foundation.ids import LeadKey
from locks.coordinator import Coordinator
from recovery.leader.led_bucket import LedBucket

logger = logging.getLogger(__name__)

# A store that lets others wait for so long is not asked besides.
_SILENT_S = 1.0


class NamedSession(Protocol):
    """This server's session, as far as it is looked up in ZooKeeper."""

    @property
    def name(self) -> str:
        """The name of the session node; NotLeader if there is none, or ZooKeeper is away."""

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator, over this session."""


class Confirming:
    """Confirms leads, as they are at some moment since it was asked. Safe for threads."""

    def __init__(
        self, session: NamedSession, store_waits_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`store_waits_s`: for how long others have waited for the log store, and do still."""
        self._session = session
        self._store_waits_s = store_waits_s

    def confirm(self, key: LeadKey, led: LedBucket) -> None:
        """Raise NotLeader, Deposed or Closed unless this server leads the bucket."""
        if not led.locked:
            led.bucket.confirm()
            return
        if self._store_waits_s() >= _SILENT_S:
            self._ask_zookeeper(key, led)
            return
        try:
            led.bucket.confirm()
        except StorageUnavailable as exc:
            logger.info("ZooKeeper is asked who leads bucket %s: %s", key, exc)
            self._ask_zookeeper(key, led)

    def _ask_zookeeper(self, key: LeadKey, led: LedBucket) -> None:
        if self._session.coordinator.leaders.leader_now(key) != self._session.name:
            raise NotLeader(f"this server does not lead bucket {key} any more: ask who does")
        led.bucket.check_open()
