"""What the actions of a Delta log add up to: the table at one version."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from sink.lake.letters import id_of
from sink.lake.state import IN_OBJECT, vectors_name

# What a commit may have that does not change the table: who looks after it says so in the log.
_HARMLESS = frozenset({"commitInfo"})

# The name under which our commits count the table's transactions.
APPLICATION = "tallybook"

Action = Mapping[str, Any]


@dataclass
class DeltaTable:
    """The table after the actions so far: its files by their paths, and what was removed when.

    `commits`: who has changed something, by version.
    """

    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    removed: dict[str, int] = field(default_factory=dict)
    commits: dict[int, str] = field(default_factory=dict)

    def add(self, version: int, actions: Iterable[Action]) -> None:
        """Take the actions of the next version, whatever their order."""
        found = list(actions)
        self.add_checkpoint(found)
        if not is_harmless(found):
            self.commits[version] = who(found)

    def add_checkpoint(self, actions: Iterable[Action]) -> None:
        """Take the actions of a checkpoint; who has made them, it does not say."""
        found = list(actions)
        for action in found:
            if "remove" in action:
                self._remove(action["remove"])
        for action in found:
            if "metaData" in action:
                self.metadata = action["metaData"]
            if "add" in action:
                self.files[action["add"]["path"]] = action["add"]

    def _remove(self, action: Mapping[str, Any]) -> None:
        self.files.pop(action["path"], None)
        names, vector = [action["path"]], action.get("deletionVector")
        if vector is not None and vector["storageType"] == IN_OBJECT:
            names.append(vectors_name(id_of(vector["pathOrInlineDv"])))
        for name in names:
            self.removed[name] = max(
                action.get("deletionTimestamp") or 0, self.removed.get(name, 0)
            )

    def altered_since(self, version: int) -> str | None:
        """Return who has changed the table after this version, and how; None if nobody has."""
        later = sorted((at, name) for at, name in self.commits.items() if at > version)
        return ", ".join(f"version {at}: {name}" for at, name in later) or None


def checkpoint_actions(rows: pa.Table) -> Iterator[Action]:
    """Yield the actions of a checkpoint; maps are lists of pairs there."""
    for row in rows.to_pylist():
        for name, action in row.items():
            if action is None:
                continue
            if name == "metaData":
                action["configuration"] = dict(action.get("configuration") or ())
            yield {name: action}


def is_harmless(actions: Iterable[Action]) -> bool:
    """Whether a commit does not change the table."""
    return all(_HARMLESS.issuperset(action) for action in actions)


def is_ours(actions: Iterable[Action]) -> bool:
    """Whether a tiering job has made a commit."""
    return any(action.get("txn", {}).get("appId") == APPLICATION for action in actions)


def who(actions: Iterable[Action]) -> str:
    """Return who has made a commit, and what it was."""
    for action in actions:
        if "commitInfo" in action:
            info = action["commitInfo"]
            engine = info.get("engineInfo") or info.get("clientVersion") or "somebody"
            return f"{info.get('operation', 'a commit')} by {engine}"
    return "by somebody who has not said more"
