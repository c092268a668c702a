"""Where things are in ZooKeeper, and which names it can hold.

/clock                               touched to learn ZooKeeper's time
/next-table-id                       a counter, never reset
/tables/<name>                       the table's id
/ids/<id>                            the table's definition
/ids/<id>/epoch                      the epoch counter of the table, never reset
/ids/<id>/owners/<owner id>          a lock record
/ids/<id>/partitions                 the partitions' ids by their keys; the next id, never reset
/servers/<session name>              a live tablet server (ephemeral): where it listens
/leaders/<id>-<partition>-<number>   a bucket's leader (ephemeral): its session name
"""

import re

from locks.errors import InvalidOwner, InvalidRequest

NEXT_TABLE_ID = "/next-table-id"
TABLES = "/tables"
IDS = "/ids"
SERVERS = "/servers"
LEADERS = "/leaders"

LONGEST_NAME = 200
_TABLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def table_name_path(name: str) -> str:
    """Return where a table's name is kept; InvalidRequest for a name with tricks in it."""
    if not _TABLE_NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise InvalidRequest(
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
    reason = None
    if not owner:
        reason = "it is empty"
    elif len(owner.encode(errors="replace")) > LONGEST_NAME:
        reason = f"it is longer than {LONGEST_NAME} bytes"
    elif owner in (".", ".."):
        reason = "it is a relative path"
    elif "/" in owner:
        reason = "it has a '/'"
    elif not all(map(_can_be_in_a_path, owner)):
        reason = "it has a character that cannot be printed, or lies beyond 16 bits"
    if reason is not None:
        raise InvalidOwner(f"{owner!r} cannot be an owner id: {reason}")
    return f"{owners_path(table_id)}/{owner}"


def partitions_path(table_id: int) -> str:
    """Return where a table's partitions are listed."""
    return f"{IDS}/{table_id}/partitions"


def server_path(name: str) -> str:
    """Return the ephemeral node of a server's session."""
    return f"{SERVERS}/{name}"


def leader_path(name: str) -> str:
    """Return the ephemeral node of a bucket's leader."""
    return f"{LEADERS}/{name}"


def _can_be_in_a_path(character: str) -> bool:
    """ZooKeeper takes neither control characters nor surrogates, private use or specials."""
    return character.isprintable() and not (
        "\ud800" <= character <= "\uf8ff" or character >= "\ufff0"
    )
