"""Whether there is a cluster below a chroot, for those who are not to make one.

The first tablet server makes a cluster; a client that was given a wrong chroot would make an empty
one there, and find no tables in it.
"""

import time

from foundation.errors import UnknownCluster
from locks.store.paths import TABLES
from locks.store.zookeeper import ZooKeeperStore

_LOOK_AGAIN_S = 0.1


def await_cluster(store: ZooKeeperStore, address: str, patience_s: float) -> None:
    """Return if there is a cluster; UnknownCluster if none has come up within this time.

    Nothing is written.
    """
    deadline = time.monotonic() + patience_s
    while store.read(TABLES) is None:
        if time.monotonic() >= deadline:
            raise UnknownCluster(_not_here(store, address))
        time.sleep(_LOOK_AGAIN_S)


def _not_here(store: ZooKeeperStore, address: str) -> str:
    hosts, _, chroot = address.partition("/")
    elsewhere = store.chroots_with(TABLES)
    found = "; ".join(f"{hosts}{'' if one == '/' else one}" for one in elsewhere)
    return (
        f"ZooKeeper at {hosts} answers, but there is no cluster below /{chroot.rstrip('/')}: "
        + (f"clusters are at {found}; " if found else "nor one level below its root; ")
        + "give the chroot that its servers were started with, or start a server there, which "
        "makes the cluster"
    )
