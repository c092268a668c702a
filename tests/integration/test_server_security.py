"""Who is let in: tokens, TLS, ZooKeeper's credentials; and what a stranger reads and leaves."""

import datetime
import http.client
import json
import logging
import pickle
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl
from pyarrow import flight

from foundation.errors import AccessDenied, AccessRefused, InvalidInput, Retryable
from locks.coordinator import Coordinator
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from locks.store.zookeeper import ZooKeeperStore
from server.__main__ import parser, to_config
from server.client.cluster import Cluster, Recipe
from server.client.connections import ServerCredentials
from server.launch.local_cluster import LocalCluster
from server.protocol import wire
from server.tablet.config import HandOverConfig, ServerConfig
from server.tablet.tablet_server import TabletServer
from tests.support.certificates import make_certificate
from tests.support.raw_flight import SCHEMA, client_of, json_log, running
from tests.support.zookeeper_server import chroot, wait_until, zookeeper_server

TOKEN = "open-sesame-4711"
CREDENTIALS = ("tallybook", "secret-1234")
WRONG: dict[str, str | None] = {"no token": None, "a wrong token": "open-sesame-4712"}


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    with zookeeper_server(tmp_path_factory.mktemp("security")) as server:
        yield server


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with ours.pem, ours.key and other.pem: certificates for 127.0.0.1."""
    directory = tmp_path_factory.mktemp("certificates")
    for name in ("ours", "other"):
        make_certificate(directory / f"{name}.pem", directory / f"{name}.key")
    return directory


def _config(tmp_path: Path, **settings: Any) -> ServerConfig:
    places: dict[str, Any] = {"logs": str(tmp_path / "logs"), "views": tmp_path / "views"}
    settings = {"credentials": CREDENTIALS, **settings}
    return ServerConfig(zookeeper="127.0.0.1:1", **places, **settings)


# --- What can be configured ---------------------------------------------------------------------


@pytest.mark.parametrize("host", ["10.0.0.7", "db.example.org", "127.0.0.2", "192.168.1.1"])
def test_a_server_that_others_can_reach_needs_a_token(tmp_path: Path, host: str) -> None:
    with pytest.raises(InvalidInput, match=f"a server on {host} can be reached by others: give it"):
        _config(tmp_path, host=host)
    assert _config(tmp_path, host=host, token=TOKEN).host == host


def test_a_token_is_refused_beside_an_open_zookeeper_unless_that_is_meant(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        _config(tmp_path, token=TOKEN, credentials=None)
    for words in (
        "ZooKeeper at 127.0.0.1:1 is open to everybody who reaches it",
        "create and drop tables",
        "user:password in TALLYBOOK_ZOOKEEPER_CREDENTIALS",
        "or say that it is meant: --allow-open-zookeeper",
    ):
        assert words in str(refused.value)
    assert TOKEN not in str(refused.value)
    open_config = _config(tmp_path, token=TOKEN, credentials=None, allow_open_zookeeper=True)
    assert open_config.credentials is None
    assert _config(tmp_path, credentials=None).token is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_on_the_loopback_address_needs_none(tmp_path: Path, host: str) -> None:
    assert _config(tmp_path, host=host).token is None


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("0.0.0.0", "no address that clients could be told"),
        ("::1", "give an IPv6 machine by its name"),
        ("", "neither a name nor"),
        ("a/b", "neither a name nor"),
        ("host:80", "neither a name nor"),
    ],
)
def test_hosts_that_clients_could_not_use_are_refused(
    tmp_path: Path, host: str, words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        _config(tmp_path, host=host, token=TOKEN)


@pytest.mark.parametrize("token", ["", "two words", "schlüssel", "a\nb", "\x00"])
def test_tokens_that_no_header_can_carry_are_refused_on_both_sides(
    tmp_path: Path, token: str
) -> None:
    with pytest.raises(InvalidInput, match="a token has letters, digits and signs of ASCII"):
        _config(tmp_path, token=token)
    with pytest.raises(InvalidInput, match="a token has letters, digits and signs of ASCII"):
        client_of("127.0.0.1:1", token=token)


def test_secrets_are_not_in_representations(tmp_path: Path) -> None:
    config = _config(tmp_path, token=TOKEN, credentials=("user", "password-0815"))
    recipe = Recipe("127.0.0.1:1", {"credentials": ("user", "password-0815")})
    for shown in (repr(config), str(config), repr(ServerCredentials(token=TOKEN)), repr(recipe)):
        assert TOKEN not in shown
        assert "password-0815" not in shown


def test_half_of_tls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="both a certificate and its key"):
        _config(tmp_path, tls_certificate=tmp_path / "x.pem")


def test_files_that_are_no_certificate_are_refused(tmp_path: Path, certificates: Path) -> None:
    (tmp_path / "garbage.pem").write_text("garbage é")
    for certificate, key in (
        (tmp_path / "garbage.pem", certificates / "ours.key"),
        (certificates / "ours.pem", certificates / "other.key"),
        (tmp_path / "missing.pem", certificates / "ours.key"),
    ):
        with pytest.raises(InvalidInput, match="are not a certificate and its key"):
            TabletServer(_config(tmp_path, tls_certificate=certificate, tls_key=key))


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"cannot listen on 192\.0\.2\.1:0: no address of"):
        TabletServer(_config(tmp_path, host="192.0.2.1", token=TOKEN))


# --- Token --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(
    zookeeper: EmbeddedZooKeeper, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Return the address of a cluster that wants a token, its server, and its log."""
    directory, address = tmp_path_factory.mktemp("guarded"), chroot(zookeeper)
    with (
        json_log() as log,
        running(address, directory, token=TOKEN, credentials=CREDENTIALS, metrics_port=0) as server,
        _insider(address) as cluster,
    ):
        table = cluster.create_table("t", SCHEMA, buckets=2, column_locks=False)
        table.put({"k": [1, 2, 3], "a": [1, 1, 1]})
        yield address, server, log


def _insider(address: str, **settings: Any) -> Cluster:
    """Return a client that has all that a guarded cluster wants, but for what is changed."""
    return client_of(address, **{"token": TOKEN, "credentials": CREDENTIALS, **settings})


@pytest.mark.parametrize("what", WRONG)
def test_every_call_to_a_server_is_refused_without_the_token(guarded: Any, what: str) -> None:
    address, _, log = guarded
    seen = len(log.lines)
    with _insider(address, token=WRONG[what]) as cluster:
        table = cluster.table("t")
        bucket = table.bucket_ids()[0]
        for call in (
            lambda: table.put({"k": [1], "a": [1]}),
            lambda: table.delete({"k": [1]}),
            lambda: table.lookup({"k": [1]}),
            lambda: list(table.changelog(bucket)),
            lambda: table.undo("x", ["a"], {bucket: 0}),
            table.end_offsets,
            cluster.status,
        ):
            with pytest.raises(AccessRefused, match=f"wants a token, and got {what}; give the"):
                call()
    refused = [line["message"] for line in log.lines[seen:]]
    assert {f"refused a {call} with {what}" for call in ("do_put", "do_get", "do_action")} == set(
        refused
    )
    with _insider(address) as cluster:
        assert cluster.table("t").lookup({"k": [1]}).column("a").to_pylist() == [1]


@pytest.mark.parametrize("action", ["ping", "lookup", "fence", "undo", "seal", "ends", "nonsense"])
def test_every_action_is_refused_to_a_stranger(guarded: Any, action: str) -> None:
    _, server, _ = guarded
    client = flight.FlightClient(f"grpc://{server.address}")
    for headers in (
        [],
        [(b"authorization", TOKEN.encode())],
        [(b"authorization", b"Bearer " + b"~" * 99)],
    ):
        options = flight.FlightCallOptions(headers=headers, timeout=180)
        with pytest.raises(flight.FlightUnauthenticatedError, match="wants a token"):
            list(client.do_action(flight.Action(action, wire.encode({})), options))
    client.close()


def test_the_metrics_want_the_token_too(guarded: Any) -> None:
    _, server, _ = guarded
    url = f"http://{server.metrics_address}/metrics"
    for headers in ({}, {"Authorization": "Bearer guess"}, {"Authorization": f"Basic {TOKEN}"}):
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            _fetch(url, headers)
        refused.value.close()
    assert "tallybook_rows_total" in _fetch(url, {"Authorization": f"Bearer {TOKEN}"})


def _fetch(url: str, headers: dict[str, str], tls: ssl.SSLContext | None = None) -> str:
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=180, context=tls) as answer:
        return str(answer.read().decode())


def test_the_token_is_not_in_the_log(guarded: Any) -> None:
    _, _, log = guarded
    for token in (TOKEN, WRONG["a wrong token"]):
        assert token not in log.text


# --- TLS ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def over_tls(
    zookeeper: EmbeddedZooKeeper, certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, TabletServer]]:
    directory, address = tmp_path_factory.mktemp("tls"), chroot(zookeeper)
    tls = {"tls_certificate": certificates / "ours.pem", "tls_key": certificates / "ours.key"}
    with running(address, directory, metrics_port=0, **tls) as server:
        with client_of(address, tls_root=certificates / "ours.pem") as cluster:
            table = cluster.create_table("t", SCHEMA, buckets=2, column_locks=False)
            table.put({"k": [1, 2, 3], "a": [1, 2, 3]})
        yield address, server


def _look_up(cluster: Cluster) -> list[int]:
    values: list[int] = cluster.table("t").lookup({"k": [1, 2, 3]}).column("a").to_pylist()
    return values


def test_a_client_with_the_root_certificate_is_served(
    over_tls: tuple[str, TabletServer], certificates: Path
) -> None:
    with client_of(over_tls[0], tls_root=str(certificates / "ours.pem")) as cluster:
        assert _look_up(cluster) == [1, 2, 3]


def test_a_client_without_tls_is_told_so(over_tls: tuple[str, TabletServer]) -> None:
    with client_of(over_tls[0], deadline_s=0.5) as cluster:
        with pytest.raises(Retryable, match="Socket closed; if it speaks TLS, give `tls_root`"):
            _look_up(cluster)
        [status] = cluster.status()
        assert "if it speaks TLS" in status["error"]


def test_a_client_with_another_root_certificate_is_told_so_at_once(
    over_tls: tuple[str, TabletServer], certificates: Path
) -> None:
    with (
        client_of(over_tls[0], tls_root=certificates / "other.pem") as cluster,
        pytest.raises(AccessRefused, match="does not vouch for the TLS certificate of server"),
    ):
        _look_up(cluster)


@pytest.mark.parametrize("content", [None, "garbage é"])
def test_a_root_certificate_that_is_none_is_told_so_at_once(
    over_tls: tuple[str, TabletServer], tmp_path: Path, content: str | None
) -> None:
    root = tmp_path / "root.pem"
    if content is not None:
        root.write_text(content)
    with (
        client_of(over_tls[0], tls_root=root) as cluster,
        pytest.raises(InvalidInput, match=r"root\.pem is no PEM file with certificates"),
    ):
        _look_up(cluster)


def test_tls_to_a_server_that_does_not_speak_it_is_told_so_at_once(
    guarded: Any, certificates: Path
) -> None:
    with (
        _insider(guarded[0], tls_root=certificates / "ours.pem") as cluster,
        pytest.raises(AccessRefused, match="does not speak TLS: leave `tls_root` out"),
    ):
        cluster.table("t").lookup({"k": [1]})


def test_a_certificate_of_another_address_is_told_so(
    zookeeper: EmbeddedZooKeeper, certificates: Path, tmp_path: Path
) -> None:
    address, pem, key = chroot(zookeeper), tmp_path / "far.pem", tmp_path / "far.key"
    make_certificate(pem, key, "192.0.2.1")
    with (
        running(address, tmp_path / "far", tls_certificate=pem, tls_key=key),
        client_of(address, tls_root=pem) as cluster,
    ):
        cluster.create_table("t", SCHEMA, buckets=1, column_locks=False)
        with pytest.raises(AccessRefused, match="does not vouch for the TLS certificate"):
            _look_up(cluster)


def test_the_metrics_speak_tls_too(over_tls: tuple[str, TabletServer], certificates: Path) -> None:
    trusted = ssl.create_default_context(cafile=certificates / "ours.pem")
    address = over_tls[1].metrics_address
    assert "tallybook_rows_total" in _fetch(f"https://{address}/metrics", {}, trusted)
    with pytest.raises((OSError, http.client.HTTPException)):
        _fetch(f"http://{address}/metrics", {})


# --- Certificates of clients --------------------------------------------------------------------


@pytest.fixture(scope="module")
def knowing(
    zookeeper: EmbeddedZooKeeper, certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, list[TabletServer]]]:
    """Return a cluster of two servers that want to see certificates: theirs, and a client's."""
    directory, address = tmp_path_factory.mktemp("knowing"), chroot(zookeeper)
    trusted = directory / "clients.pem"
    trusted.write_text(
        "".join((certificates / name).read_text() for name in ("ours.pem", "other.pem"))
    )
    tls: dict[str, Any] = {
        "tls_certificate": certificates / "ours.pem",
        "tls_key": certificates / "ours.key",
        "tls_client_ca": trusted,
    }

    def server(name: str) -> TabletServer:
        return TabletServer(
            ServerConfig(
                zookeeper=address,
                logs=str(directory / "logs"),
                views=directory / name,
                session_timeout_s=5,
                hand_over=HandOverConfig(settle_s=0.1),
                **tls,
            )
        )

    with server("first") as first, server("second") as second:
        yield address, [first, second]


def _shown(certificates: Path, name: str) -> dict[str, Path]:
    return {
        "tls_root": certificates / "ours.pem",
        "tls_certificate": certificates / f"{name}.pem",
        "tls_key": certificates / f"{name}.key",
    }


def test_a_client_whose_certificate_is_known_is_served_and_servers_are_to_each_other(
    knowing: tuple[str, list[TabletServer]], certificates: Path
) -> None:
    address, servers = knowing
    with client_of(address, **_shown(certificates, "other")) as cluster:
        table = cluster.create_table("t", SCHEMA, buckets=4, column_locks=False)
        table.put({"k": [1, 2, 3], "a": [1, 2, 3]})
        again = pickle.loads(pickle.dumps(cluster))
        with closing(again):
            assert _look_up(again) == [1, 2, 3]
        wait_until(lambda: len(servers[0].hosting.led()) == 2, "each has its share")
        servers[0].stop()  # It hands over, as the other one asks it to, and serves meanwhile.
        wait_until(lambda: len(servers[1].hosting.led()) == 4, "the other one leads all")
        assert _look_up(cluster) == [1, 2, 3]


@pytest.mark.parametrize("name", [None, "stranger"])
def test_whoever_shows_no_known_certificate_is_refused_before_a_call(
    knowing: tuple[str, list[TabletServer]],
    certificates: Path,
    tmp_path: Path,
    name: str | None,
) -> None:
    make_certificate(tmp_path / "stranger.pem", tmp_path / "stranger.key")
    shown: dict[str, Path] = {"tls_root": certificates / "ours.pem"}
    if name is not None:
        shown |= {"tls_certificate": tmp_path / f"{name}.pem", "tls_key": tmp_path / f"{name}.key"}
    with client_of(knowing[0], **shown, deadline_s=1) as cluster:
        with pytest.raises((AccessRefused, Retryable), match="`tls_certificate`"):
            cluster.table("t").lookup({"k": [1]})
        for address in cluster.server_addresses():
            with suppress(AccessRefused):
                assert "`tls_certificate`" in cluster.status_of(address)["error"]
    # As long as they wait for a certificate, servers count no call, and read none.
    for server in knowing[1]:
        assert server._metrics.values().get('tallybook_errors_total{call="lookup"}', 0) == 0


def test_certificates_of_clients_are_files_that_go_together(
    tmp_path: Path, certificates: Path
) -> None:
    with pytest.raises(InvalidInput, match="certificates of clients are for TLS"):
        _config(tmp_path, tls_client_ca=certificates / "ours.pem")
    tls = {"tls_certificate": certificates / "ours.pem", "tls_key": certificates / "ours.key"}
    with pytest.raises(InvalidInput, match=r"--tls-client-ca: .* is no PEM file with certificat"):
        TabletServer(_config(tmp_path, **tls, tls_client_ca=certificates / "ours.key"))
    with pytest.raises(InvalidInput, match="tls_certificate and its tls_key go together"):
        ServerCredentials(tls_root=tmp_path, tls_key=tmp_path)
    with pytest.raises(InvalidInput, match="give tls_root with it"):
        ServerCredentials(tls_certificate=tmp_path, tls_key=tmp_path)


@pytest.mark.parametrize("how", ["file", "variable"])
def test_an_empty_token_does_not_open_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    words = ["--zookeeper", "127.0.0.1:1", "--logs", str(tmp_path), "--views", str(tmp_path)]
    if how == "file":
        (tmp_path / "token").write_text("\n")
        words += ["--token-file", str(tmp_path / "token")]
    else:
        monkeypatch.setenv("TALLYBOOK_TOKEN", "")
    with pytest.raises(InvalidInput, match="is empty: put the secret there"):
        to_config(parser().parse_args(words))


@pytest.mark.parametrize("said", ["", ":secret", "user"])
def test_credentials_without_a_user_do_not_open_zookeeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setenv("TALLYBOOK_ZOOKEEPER_CREDENTIALS", said)
    words = ["--zookeeper", "127.0.0.1:1", "--logs", str(tmp_path), "--views", str(tmp_path)]
    with pytest.raises(InvalidInput, match="TALLYBOOK_ZOOKEEPER_CREDENTIALS is"):
        to_config(parser().parse_args(words))


# --- ZooKeeper ----------------------------------------------------------------------------------


def test_zookeeper_lets_in_those_with_its_credentials_only(
    zookeeper: EmbeddedZooKeeper, tmp_path: Path
) -> None:
    address = chroot(zookeeper)
    with json_log() as log, running(address, tmp_path / "server", credentials=CREDENTIALS):
        with client_of(address, credentials=CREDENTIALS) as cluster:
            table = cluster.create_table("t", SCHEMA, buckets=2, column_locks=False)
            table.put({"k": [1, 2, 3], "a": [1, 2, 3]})
            assert _look_up(cluster) == [1, 2, 3]
        others = {"without credentials": None, "with these credentials": ("tallybook", "guess")}
        for what, other in others.items():
            with (
                pytest.raises(AccessDenied, match=f"{what}; give the user and the password"),
                client_of(address, credentials=other) as cluster,
            ):
                cluster.table("t")
        with pytest.raises(AccessDenied, match="with these credentials"):
            running(address, tmp_path / "other", credentials=("tallybook", "guess")).start()
    assert CREDENTIALS[1] not in log.text


def test_a_token_alone_neither_creates_nor_drops_a_table(guarded: Any) -> None:
    with pytest.raises(AccessDenied) as refused:
        client_of(guarded[0], token=TOKEN)
    assert "without credentials" in str(refused.value)
    assert "a client as `credentials`" in str(refused.value)
    assert "in TALLYBOOK_ZOOKEEPER_CREDENTIALS" in str(refused.value)
    with _insider(guarded[0]) as cluster:
        assert cluster.list_tables() == ["t"]


def test_a_client_that_is_refused_leaves_no_connection_behind(zookeeper: EmbeddedZooKeeper) -> None:
    """Here it gets as far as the tables: the root was made without credentials."""
    address = chroot(zookeeper)
    with closing(ZooKeeperStore(address)):
        pass
    with closing(ZooKeeperStore(address, credentials=CREDENTIALS)) as store:
        Coordinator(store)
    before = set(threading.enumerate())
    with pytest.raises(AccessDenied, match="without credentials"):
        client_of(address, token=TOKEN)
    wait_until(lambda: set(threading.enumerate()) <= before, "the threads of the client ended")


def test_a_cluster_that_was_begun_in_the_open_is_refused_until_its_nodes_are_closed(
    zookeeper: EmbeddedZooKeeper, tmp_path: Path
) -> None:
    address, server = chroot(zookeeper), tmp_path / "server"
    guarded = {"token": TOKEN, "credentials": CREDENTIALS}
    with running(address, server), client_of(address) as cluster:
        cluster.create_table("t", SCHEMA, buckets=1, column_locks=False)
    root = address.removeprefix(zookeeper.address)
    nodes = _below(zookeeper, root)
    top = [path for path in nodes if path.count("/") <= 2]
    for closed, first in (([], root), (top, f"{root}/tables/t")):
        _close_all(zookeeper, closed)
        with pytest.raises(InvalidInput) as refused:
            running(address, server, **guarded).start()
        for words in (
            f"ZooKeeper at {address} is open: everybody who reaches it may write to {first}",
            f"setAcl -R {root} auth::cdrwa",
            "--allow-open-zookeeper",
        ):
            assert words in str(refused.value)
    with client_of(address, credentials=CREDENTIALS) as cluster:
        assert cluster.status() == [], "it has not joined"
    with running(address, server, **guarded, allow_open_zookeeper=True), _insider(address):
        pass
    _close_all(zookeeper, nodes)
    with running(address, server, **guarded), _insider(address) as cluster:
        cluster.table("t").put({"k": [1], "a": [1]})


@contextmanager
def _administrator(zookeeper: EmbeddedZooKeeper) -> Iterator[KazooClient]:
    auth_data = [("digest", ":".join(CREDENTIALS))]
    with closing(KazooClient(hosts=zookeeper.address, auth_data=auth_data)) as client:
        client.start()
        yield client
        client.stop()


def _below(zookeeper: EmbeddedZooKeeper, root: str) -> list[str]:
    found = [root]
    with _administrator(zookeeper) as client:
        for path in found:
            found += [f"{path}/{name}" for name in client.get_children(path)]
    return found


def _close_all(zookeeper: EmbeddedZooKeeper, paths: list[str]) -> None:
    with _administrator(zookeeper) as client:
        for path in paths:
            client.set_acls(path, [make_digest_acl(*CREDENTIALS, all=True)])


def test_a_root_that_anybody_may_write_is_refused_because_what_is_below_can_be_deleted(
    tmp_path: Path,
) -> None:
    """Without a chroot the root is ZooKeeper's own, which is open unless somebody closes it."""
    guarded = {"token": TOKEN, "credentials": CREDENTIALS}
    with zookeeper_server(tmp_path) as zookeeper:
        with (
            running(zookeeper.address, tmp_path / "a", **guarded, allow_open_zookeeper=True),
            closing(KazooClient(hosts=zookeeper.address)) as stranger,
        ):
            stranger.start()
            stranger.delete("/storage")
            stranger.stop()
        with pytest.raises(InvalidInput, match=r"may write to /: .* a chroot of its own \(host"):
            running(zookeeper.address, tmp_path / "b", **guarded).start()
        with running(f"{zookeeper.address}/tallybook", tmp_path / "c", **guarded):
            pass
        _close_all(zookeeper, ["/"])
        with running(zookeeper.address, tmp_path / "b", **guarded):
            pass


# --- The process --------------------------------------------------------------------------------


def test_the_log_of_a_server_is_json_and_has_no_secrets(certificates: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    options = [
        *("--token-file", str(tmp_path / "token"), "--allow-open-zookeeper"),
        *("--log-level", "debug"),
        *("--tls-certificate", str(certificates / "ours.pem")),
        *("--tls-key", str(certificates / "ours.key")),
    ]
    with LocalCluster(tmp_path / "cluster", options=options, session_timeout_s=5) as local:
        [server] = local.servers
        access = {"token": TOKEN, "tls_root": certificates / "ours.pem"}
        with client_of(local.address, **access) as cluster:
            table = cluster.create_table("t", SCHEMA, buckets=1, column_locks=False)
            table.put({"k": [1, 2, 3], "a": [1, 2, 3]})
            with pytest.raises(InvalidInput):
                table.put(pa.table({"k": [1], "nope": [1]}))
            assert _look_up(cluster) == [1, 2, 3]
        for strange in ({}, {"tls_root": certificates / "other.pem"}, {**access, "token": "guess"}):
            settings = {"deadline_s": 0.5, **strange}
            with (
                client_of(local.address, **settings) as cluster,
                pytest.raises((Retryable, AccessRefused)),
            ):
                _look_up(cluster)
        assert server.address is not None
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port))) as connection, suppress(OSError):
            connection.sendall(b"\x16\x03\x01" + b"\x00" * 500)
    log = server.log_path.read_text()
    for line in log.splitlines():
        fields = json.loads(line)
        assert {"time", "level", "logger", "message"} <= fields.keys()
        datetime.datetime.fromisoformat(fields["time"])
        assert fields["level"].upper() in logging.getLevelNamesMapping()
    assert "refused a put from ipv4:127.0.0.1" in log
    assert "refused a do_action with a wrong token" in log
    assert TOKEN not in log
