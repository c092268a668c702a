"""A tablet server: its place in the cluster, the buckets it leads, and the calls it answers."""

import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from foundation.background import surviving
from foundation.errors import InvalidInput, NotLeader, TallybookError
from foundation.ids import LeadKey
from locks.catalog.tables import create_if_missing
from locks.cluster.heartbeat import Heartbeat
from locks.cluster.servers import Server
from locks.coordinator import Coordinator
from locks.encoding.framing import frame_text, read_text
from locks.store.paths import STORAGE
from locks.store.reaching import in_words, look
from locks.store.zookeeper import ZooKeeperStore
from merge_engine.storage.objects import local_directory, open_storage
from merge_engine.storage.scratch import Scratch
from server.protocol.calls import (
    Drain,
    DrainAnswer,
    HandOver,
    HandOverAnswer,
    Status,
    StatusAnswer,
    TakeSnapshots,
)
from server.protocol.security import Gate, check_certificate, read_certificates
from server.tablet.complaints import Complaints
from server.tablet.config import ServerConfig
from server.tablet.hosting import CHECKPOINTS, Hosting
from server.tablet.janitor import Janitor
from server.tablet.leadership import Leadership
from server.tablet.limits import Admission
from server.tablet.log_store import check_log_store
from server.tablet.maintenance import Maintenance
from server.tablet.metrics import Metrics
from server.tablet.metrics_endpoint import MetricsEndpoint
from server.tablet.open_zookeeper import check_closed
from server.tablet.peers import FlightPeers
from server.tablet.requests import Requests
from server.tablet.scanners import Scanners
from server.tablet.service import TabletService
from server.tablet.staging import SPOOL, Staging, is_needed
from server.tablet.standing_aside import StandingAside
from server.tablet.status_report import StatusReport
from server.tablet.store_health import StoreHealth, WatchedStorage
from server.tablet.views_lock import ViewsLock

logger = logging.getLogger(__name__)

_RECONNECT_S = 0.2
_JOIN_AGAIN_S = 1.0
_JOINING = "joining the cluster"
_STOP_DEADLINE_S = 30.0
_CLOSE_DEADLINE_S = 5.0


class TabletServer:
    """Serves from `start` to `stop`, in one ZooKeeper session after the other.

    A session that is lost ends everything that rested on it: nothing is answered, all buckets are
    closed, and the server joins the cluster anew under another name.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._logs = _absolute(config.logs)
        for directory in (local_directory(self._logs), config.views):
            if directory is not None:
                _check_writable(directory)
        if self._logs == str(config.views.resolve()):
            raise InvalidInput(f"--logs and --views are both {self._logs}: give each its own")
        storage = self._storage = open_storage(self._logs, **config.storage_settings)
        self._views_lock = ViewsLock(config.views)
        self._scanners = Scanners(config.scanners)
        spool = Scratch(
            config.views / SPOOL,
            max_bytes=config.spool.max_bytes,
            min_free_bytes=config.spool.min_free_bytes,
        )
        self._staging = Staging(
            spool,
            ttl_s=config.spool.ttl_s,
            is_needed=lambda put: is_needed(put, self.coordinator),
        )
        self._health = StoreHealth()
        self._metrics = Metrics()
        self._hosting = Hosting(
            WatchedStorage(storage, self._health),
            config.views,
            config.options,
            before_close=self._scanners.close_bucket,
            clock_ms=self.now_ms,
            forgotten=self._metrics.forget_tables,
        )
        self._admission = Admission(config.limits)
        self._complaints = Complaints(logger)
        self._report = StatusReport(self._hosting, self._metrics, self._complaints)
        self._requests = Requests(self._hosting, self, store_waits_s=self._health.waiting_s)
        self._maintenance = Maintenance(
            self._requests,
            Janitor(storage, self),
            self._metrics,
            config.snapshots,
            call_s=config.call_s,
        )
        self._store: ZooKeeperStore | None = None
        self._heartbeat: Heartbeat | None = None
        self._coordinator: Coordinator | None = None
        self._server: Server | None = None
        self._leadership: Leadership | None = None
        self._peers = FlightPeers(config.token, config.client_tls)
        self._stopping = threading.Event()
        self._told_to_drain = threading.Event()
        self._joined = threading.Event()
        self._failed: Exception | None = None
        self._service = self._create_service()
        self._thread = threading.Thread(target=self._run, name="tallybook-session", daemon=True)
        self._endpoint: MetricsEndpoint | None = None

    # --- From start to stop ---------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where it listens, as clients are told."""
        return f"{self._config.host}:{self._service.port}"

    @property
    def metrics_address(self) -> str | None:
        """Where Prometheus finds the metrics."""
        return None if self._endpoint is None else self._endpoint.address

    @property
    def hosting(self) -> Hosting:
        """The buckets that are served here."""
        return self._hosting

    @property
    def told_to_drain(self) -> bool:
        """Whether a call has told it to hand over and to end: whoever runs it is to stop it."""
        return self._told_to_drain.is_set()

    def start(self, deadline_s: float = 60.0) -> "TabletServer":
        """Join the cluster; returns when the server is known to it, before its buckets are open.

        InUse if another server has the directory of the views.
        """
        try:
            self._views_lock.take()
            # What a killed server was about to upload, and what it had tried.
            for left in (CHECKPOINTS, SPOOL):
                shutil.rmtree(self._config.views / left, ignore_errors=True)
            if self._config.metrics_port is not None:
                self._endpoint = MetricsEndpoint(
                    self._metrics,
                    host=self._config.host,
                    port=self._config.metrics_port,
                    token=self._config.token,
                    tls=self._config.tls,
                )
            self._thread.start()
            if not self._joined.wait(deadline_s) or self._failed is not None:
                raise self._failed or InvalidInput(
                    f"no ZooKeeper at {self._config.zookeeper} within {deadline_s:g} s: "
                    + in_words(look(self._config.zookeeper, _JOIN_AGAIN_S))
                )
        except BaseException:
            self.stop()
            raise
        self._maintenance.start()
        return self

    def stop(self) -> None:
        """Hand over what others can have, and serve meanwhile; then end. Stopping twice is fine.

        Without others it ends at once. What nobody takes within `drain_s` is closed: what is in
        flight is finished, and what comes refused.
        """
        if self._stopping.is_set():
            return
        with surviving("handing over"):
            self._drain()
        if not self._admission.close(_STOP_DEADLINE_S):
            logger.warning("puts are still under way after %g s", _STOP_DEADLINE_S)
        self._stopping.set()
        self._maintenance.stop()
        leadership = self._leadership
        if leadership is not None:
            with surviving("giving up leads"):
                leadership.stop()
        if self._thread.ident is not None:
            self._thread.join()
        self._hosting.close_all()
        self._views_lock.release()
        self._scanners.shutdown()
        self._staging.shutdown()
        # It waits for calls without end, and a caller can keep one open for as long as it likes.
        closing = threading.Thread(target=self._service.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_DEADLINE_S)
        if closing.is_alive():
            logger.warning("calls are still open after %g s; leaving them", _CLOSE_DEADLINE_S)
        self._maintenance.shutdown()
        if self._endpoint is not None:
            self._endpoint.close()

    def _drain(self) -> None:
        leadership, store = self._leadership, self._store
        if leadership is None or store is None or not store.connected:
            return
        try:
            leadership.drain(time.monotonic() + self._config.hand_over.drain_s)
        except TallybookError as exc:  # What it leads is free when its session ends.
            logger.warning("nothing is handed over any more: %s", exc)

    def __enter__(self) -> "TabletServer":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stopping.is_set() and self._failed is None:
            joined = self._try_to_join()
            # Whoever stopped it meanwhile found no leads that it could have ended.
            if joined and not self._stopping.is_set():
                self._lead()
            with surviving("leaving the cluster"):
                self._leave()
            if self._failed is not None:
                self._joined.set()
            self._stopping.wait(_RECONNECT_S if joined else _JOIN_AGAIN_S)

    def _try_to_join(self) -> bool:
        """Join the cluster. What is in the way the first time is for whoever starts the server.

        Later there is nobody to tell, and it may pass: it is tried again, whatever it is.
        """
        try:
            self._join()
        except Exception as exc:
            if not self._joined.is_set():
                self._failed = exc
            elif isinstance(exc, TallybookError):
                self._complaints.complain(_JOINING, str(exc))
            else:
                logger.exception("cannot join the cluster")
            return False
        self._complaints.over(_JOINING)
        return True

    def _lead(self) -> None:
        """Lead what is to be led, until the session is lost or the server stops."""
        assert self._leadership is not None
        try:
            self._leadership.run()
        except TallybookError as exc:
            logger.warning("left the cluster: %s", exc)
        except Exception:
            logger.exception("left the cluster")

    def _join(self) -> None:
        config = self._config
        check_log_store(self._storage, self._logs)
        store = ZooKeeperStore(
            config.zookeeper,
            session_timeout_s=config.session_timeout_s,
            credentials=config.credentials,
        )
        self._store = store
        coordinator = Coordinator(store)
        if config.checks_zookeeper:
            check_closed(store, config.zookeeper)
        self._check_location(store)
        self._heartbeat = Heartbeat(store).start()
        server = coordinator.servers.register(self.address)
        self._coordinator, self._server = coordinator, server
        probe_s = store.session_timeout_s / 2
        aside = StandingAside(
            coordinator.servers,
            server,
            self._health,
            self._complaints,
            probe=lambda: check_log_store(self._storage, self._logs, deadline_s=probe_s),
            unable_after_s=store.session_timeout_s / 2,
        )
        self._leadership = Leadership(
            coordinator,
            server,
            self._hosting,
            peers=self._peers,
            aside=aside,
            config=config.hand_over,
            complaints=self._complaints,
        )
        logger.info("joined as %s on %s", server.name, self.address)
        self._joined.set()

    def _leave(self) -> None:
        """Close everything that rested on the session, before there is another one."""
        self._server = None
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()
        leadership, self._leadership = self._leadership, None
        if leadership is not None:
            with surviving("ending the leads of a session"):
                leadership.close()
        self._hosting.close_all()
        self._coordinator = None
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _check_location(self, store: ZooKeeperStore) -> None:
        """All servers of a cluster have one log storage: in another one they would find nothing."""
        create_if_missing(store, 30.0, STORAGE, frame_text(self._logs))
        node = store.read(STORAGE)
        known = self._logs if node is None else read_text(STORAGE, node.data)
        if known != self._logs:
            raise InvalidInput(
                f"the logs of this cluster are in {known}, and this server was told {self._logs}; "
                "give all servers the same"
            )

    def _create_service(self) -> TabletService:
        config = self._config
        security: dict[str, Any] = {}
        scheme = "grpc"
        if config.tls_certificate is not None and config.tls_key is not None:
            scheme = "grpc+tls"
            check_certificate(config.tls_certificate, config.tls_key)
            security["tls_certificates"] = [
                (config.tls_certificate.read_bytes(), config.tls_key.read_bytes())
            ]
        if config.tls_client_ca is not None:
            security["verify_client"] = True
            security["root_certificates"] = read_certificates(
                config.tls_client_ca, "--tls-client-ca"
            )
        security["middleware"] = {"gate": Gate(config.token)}
        self._report.add_gauges(self._admission, self._scanners, self._staging, config.views)
        try:
            return TabletService(
                f"{scheme}://{config.host}:{config.port}",
                self._requests,
                self._admission,
                self._metrics,
                scanners=self._scanners,
                staging=self._staging,
                complaints=self._complaints,
                lookup_max_keys=config.limits.lookup_max_keys,
                actions={
                    TakeSnapshots: self._maintenance.take,
                    HandOver: self._hand_over,
                    Drain: self._be_drained,
                    Status: lambda _: StatusAnswer(status=self.status()),
                },
                call_s=config.call_s,
                **security,
            )
        except pa.ArrowException as exc:  # It does not say why.
            raise InvalidInput(
                f"cannot listen on {config.host}:{config.port}: no address of this machine, or "
                "the port is taken"
            ) from exc

    # --- The session, as the service asks for it ------------------------------------------------

    @property
    def name(self) -> str:
        """The name of the session node; NotLeader where `check_connected` raises it."""
        self.check_connected()
        server = self._server
        if server is None:
            raise self._outside()
        return server.name

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator, over this session."""
        coordinator = self._coordinator
        if coordinator is None:
            raise self._outside()
        return coordinator

    def check(self) -> None:
        """Raise NotLeader unless the session is certainly alive: else others may lead by now."""
        heartbeat = self._heartbeat
        if self._server is None or heartbeat is None or not heartbeat.alive:
            raise self._outside()

    def check_connected(self) -> None:
        """Raise NotLeader unless, besides, the connection to ZooKeeper is up: for who writes."""
        self.check()
        store = self._store
        if store is None or not store.connected:
            raise self._outside()

    def now_ms(self) -> int:
        """Return ZooKeeper's time; NotLeader if there is no session at the moment."""
        heartbeat = self._heartbeat
        if heartbeat is None:
            raise self._outside()
        return heartbeat.now_ms()

    def look_again(self) -> None:
        """Say that leads may have changed."""
        leadership = self._leadership
        if leadership is not None:
            leadership.look_again()

    def _outside(self) -> NotLeader:
        return NotLeader(
            f"ZooKeeper at {self._config.zookeeper} is away from server {self.address}, which no "
            "longer knows whether it leads; ask again"
        )

    # --- What other servers ask -----------------------------------------------------------------

    def _hand_over(self, call: HandOver) -> HandOverAnswer:
        self.check_connected()
        leadership = self._leadership
        if leadership is None:
            raise self._outside()
        refused = leadership.hand_over(LeadKey(call.table_id, call.bucket), call.session)
        return HandOverAnswer(refused=refused)

    # --- What people ask ------------------------------------------------------------------------

    def _be_drained(self, _: Drain) -> DrainAnswer:
        self._told_to_drain.set()
        return DrainAnswer(buckets=len(self._hosting.led()))

    def unready(self) -> str | None:
        """Return why it is not ready: it serves nothing, or not all that it is to lead."""
        if self._server is None:
            return "it is not in the cluster"
        try:
            self.check_connected()
        except NotLeader:
            return f"ZooKeeper at {self._config.zookeeper} is away"
        unopened = self._hosting.unopened()
        return f"{len(unopened)} buckets are not open yet" if unopened else None

    def status(self) -> dict[str, Any]:
        """Return counters and buckets, for people and the command line."""
        server = self._server
        return self._report.report(
            address=self.address,
            session=server.name if server is not None else None,
            metrics_address=self.metrics_address,
        )


def _check_writable(directory: Path) -> None:
    """Raise InvalidInput now, rather than when the first bucket is opened and nobody is there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        writable = os.access(directory, os.W_OK | os.X_OK)
    except OSError as exc:
        raise InvalidInput(f"{directory} is no directory to write to: {exc}") from exc
    if not writable:
        raise InvalidInput(f"{directory} cannot be written to; give one that can")


def _absolute(location: str) -> str:
    """Return a directory as an absolute path, so that all servers mean the same; URLs as is."""
    directory = local_directory(location)
    return location if directory is None else str(Path(directory).resolve())
