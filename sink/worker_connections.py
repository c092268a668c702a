"""The connections of a Python process that Spark has started: shared by all that runs in it.

Spark starts a process per task, and one for each step of planning, and uses it again for a while. A
connection takes longer than most of what is done over it.
"""

import pickle
import threading

from server.client.cluster import Cluster, Recipe

_lock = threading.Lock()
_clusters: dict[bytes, Cluster] = {}
_epochs: dict[tuple[bytes, str], int] = {}


def connected(recipe: Recipe, patience_s: float | None = None) -> Cluster:
    """Return this process's connection to a cluster, with these very settings.

    `patience_s`: how long to look for a ZooKeeper where there is none, if it is to be made.
    """
    key = _key(recipe)
    with _lock:
        found = _clusters.get(key)
        if found is None:
            found = _clusters[key] = recipe.connect(patience_s=patience_s)
        return found


def disconnect(recipe: Recipe) -> None:
    """Close the connection, if there is one: whoever comes next has another."""
    with _lock:
        found = _clusters.pop(_key(recipe), None)
    if found is not None:
        found.close()


def is_new_epoch(recipe: Recipe, owner: str, epoch: int) -> bool:
    """Whether this process hears of this epoch of an owner for the first time.

    A writer begins another one when a leader has moved: then what the connection knows of leaders
    is old, and a server that is gone without a word would be waited for once more.
    """
    key = _key(recipe), owner
    with _lock:
        known = _epochs.get(key)
        _epochs[key] = epoch
    return known != epoch


def _key(recipe: Recipe) -> bytes:
    """Whoever has other credentials has another connection."""
    return pickle.dumps((recipe.address, sorted(recipe.settings.items(), key=lambda one: one[0])))
