"""Whether ZooKeeper is open to strangers: a token then protects less than it seems to.

A token is for the calls to servers. Tables are created and dropped in ZooKeeper, and the files of
a dropped one are deleted by the servers: whoever can write there needs no token for that. So a
server that has one does not join a cluster whose nodes anybody may write, unless told to.
"""

from collections.abc import Sequence

from foundation.errors import InvalidInput
from locks.store.paths import (
    ASIDE,
    DROPPED,
    IDS,
    LEADERS,
    LEASES,
    NEXT_TABLE_ID,
    SERVERS,
    SNAPSHOTS,
    STORAGE,
    TABLES,
)
from locks.store.zookeeper import CLOCK_PATH, CREDENTIALS_VARIABLE, ZooKeeperStore

ALLOW = "--allow-open-zookeeper"
_ROOT = ""
# One node per table is below these. What is below servers and leaders goes with their sessions.
_LISTS = (TABLES, IDS, SNAPSHOTS, LEASES, DROPPED)
_TOP = (_ROOT, CLOCK_PATH, STORAGE, NEXT_TABLE_ID, *_LISTS, SERVERS, ASIDE, LEADERS)
_NAMED = 3


def no_credentials(zookeeper: str) -> InvalidInput:
    """Return the error of a server that has a token, and no credentials for ZooKeeper."""
    return InvalidInput(
        f"this server has a token, and ZooKeeper at {zookeeper} is open to everybody who reaches "
        "it: they create and drop tables, whose files are then deleted, without the token. Give "
        f"ZooKeeper's credentials, user:password in {CREDENTIALS_VARIABLE}; or say that it is "
        f"meant: {ALLOW}"
    )


def check_closed(store: ZooKeeperStore, zookeeper: str) -> None:
    """Raise InvalidInput if anybody may write the nodes of the cluster. They are there by now.

    Looks at those that the cluster begins with and one of each table, not at all below them.
    """
    below = [f"{path}/{name}" for path in _LISTS for name in store.children(path)]
    found = store.world_writable([*_TOP, *below])
    if not found:
        return
    _, slash, chroot = zookeeper.partition("/")
    root = f"{slash}{chroot}".rstrip("/")
    raise InvalidInput(
        f"ZooKeeper at {zookeeper} is open: everybody who reaches it may write to "
        f"{_listed([root + path or '/' for path in found])}: they create and drop tables, whose "
        "files are then deleted, without the token of this server. Close what was made without "
        f"credentials, in zkCli.sh: addauth digest USER:PASSWORD, then {_commands(root)}; or say "
        f"that it is meant: {ALLOW}"
    )


def _listed(paths: Sequence[str]) -> str:
    more = len(paths) - _NAMED
    return ", ".join(paths[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _commands(root: str) -> str:
    if root:
        return f"setAcl -R {root} auth::cdrwa"
    return (
        "setAcl / auth::cdrwa, and setAcl -R for each of the others. ZooKeeper's own root is open "
        "from the beginning: a new cluster is better given a chroot of its own (host:port/name)"
    )
