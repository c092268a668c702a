"""What can go wrong between client and server, besides what the packages below raise.

TallybookError
├── Retryable
│   ├── Overloaded         the server is at one of its limits; nothing was changed
│   │   └── TooManyScanners  of scanners: per bucket, or in all
│   ├── ServerUnavailable  no server answered within the deadline; nothing was changed
│   └── StagedPutLost      the server no longer has what was uploaded of a large put
├── InvalidInput
│   ├── PartitionGone      a partition was dropped while a call was under way
│   └── BadRequest         bytes that no client of ours sends
├── UnknownOrExpiredScannerError  a scanner that is no more: begin the scan again
├── AccessRefused          the token is missing or wrong, or TLS does not fit
└── ServerFailed           a bug or a broken machine: the server's log says more
"""

from merge_engine import InvalidInput, Retryable, TallybookError


class Overloaded(Retryable):
    """The server is at its limit of puts or bytes in flight, or stops. Try again later."""


class TooManyScanners(Overloaded):
    """The bucket or the server has as many scanners as it may. Close one, or try again later."""


class ServerUnavailable(Retryable):
    """No server answered within the deadline, and nothing was changed. Try again."""


class StagedPutLost(Retryable):
    """The server no longer has what was uploaded of a large put. Start over."""


class PartitionGone(InvalidInput):
    """A partition was dropped meanwhile, and perhaps made anew. Send the call again."""


class BadRequest(InvalidInput):
    """A request that cannot be read: cut short, too large, or of another version."""


class UnknownOrExpiredScannerError(TallybookError):
    """The scanner was closed, not used in time, or its bucket moved. Begin the scan again."""


class AccessRefused(TallybookError):
    """The token is missing or wrong, or TLS does not fit. Give what the server wants."""


class ServerFailed(TallybookError):
    """The server failed in a way that it did not foresee. Its log has the traceback."""
