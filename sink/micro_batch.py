"""A micro-batch, and what is known of it while it is written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foundation.errors import InvalidInput
from recovery.writer.access import Grant
from sink.progress import BatchProgress
from sink.quarantine import Quarantine
from sink.watching import BatchWatch


class KeysRefused(InvalidInput):
    """A task set keys aside whose rows other tasks may have put. Write the batch without them."""

    def __init__(self, keys: Mapping[bytes, str]) -> None:
        super().__init__(f"{len(keys)} keys are refused")
        self.keys = keys


@dataclass
class MicroBatch:
    """A micro-batch, and what is known of it: `refused` are keys whose rows are set aside, why.

    `fingerprint` tells it from another that comes under its number; "" if nothing does. `aside` is
    where its bad rows went last.
    """

    frame: Any
    number: int
    progress: BatchProgress
    fingerprint: str = ""
    refused: dict[bytes, str] = field(default_factory=dict)
    aside: Quarantine | None = None
    watch: BatchWatch | None = None

    def put_under(self, grant: Grant) -> None:
        """Note under which token the batch is put."""
        if self.watch is not None:
            self.watch.put_under(grant.token)
