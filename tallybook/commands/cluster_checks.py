"""What `tallybook doctor` looks at of a cluster: ZooKeeper, its chroot, servers, the log store."""

import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from foundation.errors import TallybookError, UnknownOutcome
from foundation.versions import version_of
from locks.encoding.framing import read_text
from locks.store.base import Create, Delete
from locks.store.paths import STORAGE
from locks.store.zookeeper import ZooKeeperStore
from merge_engine.storage.objects import local_directory
from server.client.cluster import Cluster
from server.tablet.log_store import check_log_store
from tallybook.commands.checks import Finding, fine, warning, wrong
from tallybook.commands.machine_checks import check_disk
from tallybook.commands.output import counted
from tallybook.connecting import Reach

MOST_SKEW_S = 5.0
_DEFAULT_PORT = 2181


def check_cluster(reach: Reach) -> list[Finding]:
    """Return what was found, up to where nothing more can be found out."""
    findings = [_check_zookeeper_port(host, reach) for host in _hosts(reach.address)]
    try:
        cluster = reach.connect()
    except (TallybookError, OSError) as exc:
        advice = "see that ZooKeeper runs, and that address and chroot are those of the servers"
        return [*findings, wrong("ZooKeeper", str(exc), advice)]
    with closing(cluster):
        findings.append(_check_writable(cluster, reach))
        findings.append(_check_clock("ZooKeeper's clock", cluster.coordinator.store.now_ms()))
        storage = _location(cluster)
        if storage is None:
            advice = "start a server with `tallybook serve`; or is the chroot another one?"
            return [*findings, wrong("cluster", "no server has ever joined it", advice)]
        findings += _check_servers(cluster)
        findings += _check_storage(cluster, storage, reach.deadline_s)
    return findings


def _hosts(address: str) -> list[tuple[str, int]]:
    """Return the hosts and ports of an address; what is wrong with it, connecting tells."""
    found = []
    for one in address.partition("/")[0].split(","):
        host, _, port = one.strip().rpartition(":")
        if host and port.isdigit():
            found.append((host, int(port)))
        elif one.strip():
            found.append((one.strip(), _DEFAULT_PORT))
    return found


def _check_zookeeper_port(host: tuple[str, int], reach: Reach) -> Finding:
    name, port = host
    what = f"port {name}:{port}"
    try:
        with socket.create_connection(host, timeout=reach.deadline_s):
            return fine(what, "answers")
    except (OSError, OverflowError) as exc:
        advice = "see that ZooKeeper runs there, and that no firewall is between"
        return wrong(what, f"cannot be reached: {exc}", advice)


def _check_writable(cluster: Cluster, reach: Reach) -> Finding:
    """Create a node and delete it: whether that is allowed is told by nothing else."""
    store = cluster.coordinator.store
    path = f"/doctor-{uuid.uuid4().hex}"
    try:
        store.transact([Create(path, b"")])
        store.transact([Delete(path)])
    except UnknownOutcome as exc:
        return warning("ZooKeeper", f"answers slowly: {exc}", f"look whether {path} stays there")
    except TallybookError as exc:
        advice = "see that it has a quorum, and give its credentials"
        return wrong("ZooKeeper", f"can be read, and not written: {exc}", advice)
    return fine("ZooKeeper", f"{reach.address} is reachable and writable")


def _check_clock(what: str, time_ms: int) -> Finding:
    skew_s = time_ms / 1000 - time.time()
    found = f"{abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
    if abs(skew_s) <= MOST_SKEW_S:
        return fine(what, found)
    return warning(
        what,
        found,
        "run NTP on both: nothing is counted wrongly, but times that are shown, and by which logs "
        "are kept, are off",
    )


def _location(cluster: Cluster) -> str | None:
    store = cluster.coordinator.store
    assert isinstance(store, ZooKeeperStore)
    node = store.read(STORAGE)
    return None if node is None else read_text(STORAGE, node.data)


def _check_servers(cluster: Cluster) -> list[Finding]:
    tables = len(cluster.list_tables())
    try:
        servers = cluster.status()
    except TallybookError as exc:  # Which is all of them, and of what they were asked with.
        advice = "see that --token-file and --tls-root are those of the servers"
        return [wrong("servers", str(exc), advice)]
    found = f"{counted(len(servers), 'server')}, {counted(tables, 'table')}"
    if not servers:
        return [wrong("cluster", found, "no server runs: start one with `tallybook serve`")]
    return [fine("cluster", found), *(one for each in servers for one in _check_server(each))]


def _check_server(server: Mapping[str, Any]) -> Sequence[Finding]:
    what = f"server {server['address']}"
    if "error" in server:
        advice = "see that it runs, that its port is open, and that token and TLS are right"
        return [wrong(what, f"does not answer: {server['error']}", advice)]
    problems = "; ".join(f"{about}: {why}" for about, why in server["problems"].items())
    if problems:
        return [wrong(what, problems, "`tallybook status` has more; so has its log")]
    ours, theirs = version_of("tallybook"), server.get("version", "unknown")
    findings = [fine(what, f"leads {counted(len(server['buckets']), 'bucket')}, {theirs}")]
    if theirs != ours:
        advice = f"this machine has {ours}: clients and servers of one release belong together"
        findings = [warning(what, f"is of version {theirs}", advice)]
    if "time_ms" in server:
        skew = _check_clock(f"clock of {server['address']}", server["time_ms"])
        findings += [skew] if skew.advice else []
    return findings


def _check_storage(cluster: Cluster, location: str, deadline_s: float) -> list[Finding]:
    directory = local_directory(location)
    if directory is not None and not directory.exists():
        advice = "servers have it; on this machine it is needed by nobody but scans of snapshots"
        return [warning("log store", f"{location} is not on this machine", advice)]
    try:
        check_log_store(cluster.storage(), location, deadline_s=deadline_s)
    except (TallybookError, OSError) as exc:
        return [wrong("log store", str(exc), "servers that cannot write there do not start")]
    findings = [fine("log store", f"{location}: objects can be created once, and read")]
    if directory is not None:
        findings.append(check_disk("disk of the log store", Path(directory)))
    return findings
