"""Where things are in ZooKeeper, and which names it can hold.

/clock                               touched to learn ZooKeeper's time
/storage                             which object store has the logs of all tables
/next-table-id                       a counter, never reset
/tables/<name>                       the table's id
/ids/<id>                            the table's definition
/ids/<id>/epoch                      the epoch counter of the table, never reset
/ids/<id>/owners/<owner id>          a lock record
/ids/<id>/partitions                 the partitions' ids by their keys; the next id, never reset
/snapshots/<id>/<partition>-<number> a bucket's list of snapshots
/leases/<id>                         written whenever a lease is created: its version counts them
/leases/<id>/<lease id>              a lease on snapshots
/dropped/<id>                        what a dropped table was
/copies/<id>.<name>                  a copy of a table in a lake, and how far it is
/servers/<session name>              a live tablet server (ephemeral): where it listens
/aside/<session name>                a live server that is to lead nothing (ephemeral): why
/leaders/<id>-<partition>-<number>   a bucket's leader (ephemeral): its session name

Snapshots and leases are not below /ids: they outlive a dropped table, until its files are deleted.
"""

import re

from foundation.errors import InvalidInput, InvalidLease, InvalidOwner

STORAGE = "/storage"
NEXT_TABLE_ID = "/next-table-id"
TABLES = "/tables"
IDS = "/ids"
SNAPSHOTS = "/snapshots"
LEASES = "/leases"
DROPPED = "/dropped"
COPIES = "/copies"
SERVERS = "/servers"
ASIDE = "/aside"
LEADERS = "/leaders"

LONGEST_NAME = 200
_TABLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def table_name_path(name: str) -> str:
    """Return where a table's name is kept; InvalidInput for a name with tricks in it."""
    if not isinstance(name, str):
        raise InvalidInput(f"the name of a table is a text, not {name!r}")
    if not _TABLE_NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise InvalidInput(
            f"{name!r} is not a table name: letters, digits, '_', '-' and '.', not beginning "
            f"with '-' or '.', at most {LONGEST_NAME}"
        )
    return f"{TABLES}/{name}"


def table_path(table_id: int) -> str:
    """Return where a table's definition is kept."""
    return f"{IDS}/{table_id}"


def epoch_path(table_id: int) -> str:
    """Return where a table's epoch counter is kept."""
    return f"{IDS}/{table_id}/epoch"


def owners_path(table_id: int) -> str:
    """Return the parent of a table's lock records."""
    return f"{IDS}/{table_id}/owners"


def owner_path(table_id: int, owner: str) -> str:
    """Return where an owner's lock record is kept; InvalidOwner for what ZooKeeper cannot hold."""
    _judge(owner, "an owner id", InvalidOwner)
    return f"{owners_path(table_id)}/{owner}"


def partitions_path(table_id: int) -> str:
    """Return where a table's partitions are listed."""
    return f"{IDS}/{table_id}/partitions"


def snapshots_path(table_id: int) -> str:
    """Return the parent of a table's lists of snapshots."""
    return f"{SNAPSHOTS}/{table_id}"


def snapshot_list_path(table_id: int, partition: int, number: int) -> str:
    """Return where the snapshots of a bucket are listed."""
    return f"{SNAPSHOTS}/{table_id}/{partition}-{number}"


def leases_path(table_id: int) -> str:
    """Return the parent of a table's leases."""
    return f"{LEASES}/{table_id}"


def lease_path(table_id: int, lease_id: str) -> str:
    """Return where a lease is kept; InvalidLease for an id that ZooKeeper cannot hold."""
    _judge(lease_id, "a lease id", InvalidLease)
    return f"{leases_path(table_id)}/{lease_id}"


def dropped_path(table_id: int) -> str:
    """Return where it is kept what a dropped table was."""
    return f"{DROPPED}/{table_id}"


def copy_path(table_id: int, name: str) -> str:
    """Return where it is kept how far a copy of a table in a lake is."""
    return f"{COPIES}/{table_id}.{name}"


def server_path(name: str) -> str:
    """Return the ephemeral node of a server's session."""
    return f"{SERVERS}/{name}"


def aside_path(name: str) -> str:
    """Return the ephemeral node of a server's session that stands aside."""
    return f"{ASIDE}/{name}"


def leader_path(name: str) -> str:
    """Return the ephemeral node of a bucket's leader."""
    return f"{LEADERS}/{name}"


def _judge(name: str, what: str, error: type[InvalidInput]) -> None:
    """Raise the error if the name cannot be that of a node."""
    reason = None
    if not isinstance(name, str):
        reason = "it is no text"
    elif not name:
        reason = "it is empty"
    elif len(name.encode(errors="replace")) > LONGEST_NAME:
        reason = f"it is longer than {LONGEST_NAME} bytes"
    elif name in (".", ".."):
        reason = "it is a relative path"
    elif "/" in name:
        reason = "it has a '/'"
    elif not all(map(_can_be_in_a_path, name)):
        reason = "it has a character that cannot be printed, or lies beyond 16 bits"
    if reason is not None:
        raise error(f"{name!r} cannot be {what}: {reason}")


def _can_be_in_a_path(character: str) -> bool:
    """ZooKeeper takes neither control characters nor surrogates, private use or specials."""
    return character.isprintable() and not (
        "\ud800" <= character <= "\uf8ff" or character >= "\ufff0"
    )
