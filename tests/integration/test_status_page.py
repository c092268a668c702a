"""The status page: its data, who may see them, and the page in a real browser."""

import base64
import json
import math
import re
import shutil
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from foundation.errors import InvalidInput, Unavailable
from foundation.failpoints import arm
from locks.catalog.copies import LakeCopy
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from merge_engine.aggregates.registry import AggFunction
from merge_engine.schema.builder import SchemaBuilder
from recovery.writer.rows import Rows
from server.client.cluster import Cluster, connect
from server.page import overview
from server.page.of_cluster import page_of_cluster
from server.page.of_server import page_of
from server.page.overview import Overview
from server.page.status_requests import StatusRequests
from server.tablet.tablet_server import TabletServer
from tests.support.metrics import CLUSTER_METRICS
from tests.support.raw_flight import client_of, running
from tests.support.zookeeper_proxy import Proxy
from tests.support.zookeeper_server import chroot, wait_until, zookeeper_server

ORDERS = (
    SchemaBuilder()
    .column("customer", "STRING")
    .column("day", "DATE")
    .agg_column("orders", "BIGINT", AggFunction.COUNT)
    .agg_column("spent", "BIGINT", AggFunction.SUM)
    .primary_key("customer", "day")
    .build()
)
TOKEN = "open-sesame-4711"
CREDENTIALS = ("tallybook", "secret-1234")
NASTY = '<img src=x onerror="document.title=1">'


def order(customer: str, *, spent: int) -> Rows:
    """Return an order of today."""
    day = pa.array(["2026-11-18"]).cast(pa.date32())
    rows = {"customer": [customer], "day": day, "orders": [1], "spent": [spent]}
    return Rows(data=pa.table(rows))


@dataclass
class Paged:
    """A cluster whose server has a page, with a token."""

    address: str
    server: TabletServer
    cluster: Cluster
    url: str

    def get(self, path: str, token: str | None = TOKEN, **headers: str) -> tuple[int, str]:
        """Return the status and the body of an answer."""
        request = urllib.request.Request(self.url.rstrip("/") + path)
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        for name, value in headers.items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=180) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read().decode()

    def overview(self) -> dict[str, Any]:
        """Return what the page is made of, once there is something."""
        found: dict[str, Any] = {}

        def is_there() -> bool:
            status, body = self.get("/overview.json")
            assert status == 200
            found.update(json.loads(body))
            return "servers" in found

        wait_until(is_there, "the cluster was looked at")
        return found


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    """Return a ZooKeeper for this module; each cluster has its chroot."""
    with zookeeper_server(tmp_path_factory.mktemp("page")) as server:
        yield server


@contextmanager
def with_page(address: str, directory: Path, **settings: Any) -> Iterator[tuple[TabletServer, str]]:
    """Run a server with a page; yield it, and where its page is."""
    server = running(address, directory, **settings)
    with server, page_of(server, server._config, 0) as page:
        assert page is not None
        yield server, page.url


@pytest.fixture(scope="module")
def paged(
    zookeeper: EmbeddedZooKeeper, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Paged]:
    """Return a server with a page, and a table that one owner has written and another holds."""
    directory, address = tmp_path_factory.mktemp("paged"), chroot(zookeeper)
    with ExitStack() as stack:
        server, url = stack.enter_context(
            with_page(address, directory, token=TOKEN, credentials=CREDENTIALS)
        )
        cluster = stack.enter_context(client_of(address, token=TOKEN, credentials=CREDENTIALS))
        table = cluster.create_table("orders", ORDERS, buckets=3)
        writer = stack.enter_context(
            cluster.writer(table, owner_id="shop", columns=["orders", "spent"])
        )
        writer.write(1, order("ann", spent=20))
        writer.write(2, order(NASTY, spent=5))
        yield Paged(address, server, cluster, url)


def test_the_overview_has_servers_buckets_tables_and_locks(paged: Paged) -> None:
    seen = paged.overview()
    assert seen["error"] is None
    assert seen["cluster"] == paged.address
    [server] = seen["servers"]
    assert (server["address"], server["buckets"], server["problems"]) == (
        paged.server.address,
        3,
        {},
    )
    [table] = seen["tables"]
    assert (table["name"], table["rows"]) == ("orders", 2)
    assert [bucket["server"] for bucket in table["buckets"]] == [paged.server.address] * 3
    functions = {column["name"]: column["function"] for column in table["schema"]}
    assert functions["customer"] == functions["day"] == "key"
    assert functions["spent"] == "sum"
    assert [column["type"] for column in table["schema"]] == ["STRING", "DATE", "BIGINT", "BIGINT"]
    [lock] = table["locks"]
    assert (lock["owner"], lock["state"], lock["batch"]) == ("shop", "ready", 2)
    assert lock["uncommitted_changes"] == 0
    assert "metrics" not in server
    assert TOKEN not in json.dumps(seen)


def test_uncommitted_work_and_what_owners_did_are_seen(paged: Paged) -> None:
    table = paged.cluster.create_table("open", ORDERS, buckets=2)

    def lock() -> dict[str, Any]:
        found = [one for one in paged.overview()["tables"] if one["name"] == "open"]
        return dict(found[0]["locks"][0]) if found and found[0]["locks"] else {}

    with paged.cluster.writer(table, owner_id="job", columns=["orders", "spent"]) as writer:
        wait_until(lambda: lock().get("state") == "ready", "the lock is seen")

        def is_seen() -> None:
            wait_until(lambda: lock().get("uncommitted_changes") == 1, "the put is seen")

        with arm("writer.put", is_seen):
            writer.write(1, order("bob", spent=7))
        wait_until(lambda: lock().get("batch") == 1, "the batch is seen")
        assert lock()["uncommitted_changes"] == 0
    wait_until(lambda: lock().get("state") == "released", "the release is seen")
    assert [event["kind"] for event in lock()["events"]][-2:] == ["batch", "released"]
    paged.cluster.drop_table("open")


def test_a_snapshot_is_as_old_as_what_it_lacks(paged: Paged) -> None:
    table = paged.cluster.create_table("aging", ORDERS, buckets=2)
    overview = Overview(paged.cluster)

    def oldest_s() -> float | None:
        [seen] = [one for one in overview.look()["tables"] if one["name"] == "aging"]
        return cast(float | None, seen["snapshots"]["oldest_s"])

    with paged.cluster.writer(table, owner_id="job", columns=["orders", "spent"]) as writer:
        writer.write(1, order("bob", spent=7))
        assert oldest_s() is None
        table.snapshot()
        assert oldest_s() == 0.0, "nothing was written since"
        writer.write(2, order("bob", spent=7))
        wait_until(lambda: (oldest_s() or 0) > 0, "its age counts from now on")
    paged.cluster.drop_table("aging")


def test_of_former_owners_the_latest_are_told_of(
    paged: Paged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "_FORMER_TOLD", 2)
    table = paged.cluster.create_table("handed_on", ORDERS, buckets=1)
    for number in range(4):
        with paged.cluster.writer(
            table, owner_id=f"job-{number}", columns=["orders", "spent"], handover=True
        ) as writer:
            writer.write(0, order("bob", spent=7))

    def seen() -> dict[str, Any]:
        tables = Overview(paged.cluster).look()["tables"]
        [found] = [one for one in tables if one["name"] == "handed_on"]
        return dict(found)

    assert [lock["owner"] for lock in seen()["locks"]] == ["job-2", "job-3"]
    assert seen()["former_owners"] == 2
    with paged.cluster.writer(table, owner_id="job-0", columns=["orders"], handover=True):
        held = [lock["owner"] for lock in seen()["locks"] if lock["state"] != "released"]
        assert held == ["job-0"], "who holds something is told of, whenever it began"
    monkeypatch.setattr(overview, "_FORMER_MS", 0)
    assert seen()["locks"] == []
    [status] = paged.cluster.status()
    [bucket] = [one for one in status["buckets"] if one["table"] == "handed_on"]
    assert len(bucket["owners"]) <= 2
    counted = f'tallybook_rows_total{{table="{table.name}"}}'
    assert counted in status["metrics"]
    paged.cluster.drop_table("handed_on")
    wait_until(
        lambda: counted not in paged.cluster.status()[0]["metrics"],
        "what was counted for a dropped table is forgotten",
    )


@pytest.mark.parametrize("token", [None, "wrong"])
@pytest.mark.parametrize(
    "path", ["/", "/metrics", "/overview.json", "/row.json?table=orders", "/nothing"]
)
def test_nothing_is_shown_without_the_token(paged: Paged, path: str, token: str | None) -> None:
    status, body = paged.get(path, token)
    assert status == 401
    assert "token" in body
    assert "orders" not in body


def test_a_browser_gives_the_token_as_a_password(paged: Paged) -> None:
    def basic(password: str) -> str:
        return "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()

    assert paged.get("/overview.json", None, Authorization=basic(TOKEN))[0] == 200
    assert paged.get("/overview.json", None, Authorization=basic("wrong"))[0] == 401
    assert paged.get("/overview.json", None, Authorization="Basic ???")[0] == 401


def test_whether_it_is_there_and_ready_is_told_to_all(paged: Paged) -> None:
    assert paged.get("/healthz", None) == (200, "ok\n")
    assert paged.get("/readyz", None) == (200, "ready\n")


def test_a_key_is_looked_up_and_wrong_ones_are_told_so(paged: Paged) -> None:
    status, body = paged.get("/row.json?table=orders&key.customer=ann&key.day=2026-11-18")
    assert status == 200
    row = json.loads(body)["row"]
    assert row == {"customer": "ann", "day": '"2026-11-18"', "orders": "1", "spent": "20"}
    for asked, words in (
        ("table=orders&key.customer=ann&key.day=monday", "day is a DATE, not 'monday'"),
        ("table=orders&key.customer=ann", "has a value for day, too"),
        ("table=nothing", "nothing"),
        ("", "table"),
    ):
        status, body = paged.get(f"/row.json?{asked}")
        assert status == 400, body
        assert words in json.loads(body)["error"]


def test_a_name_that_leads_here_is_no_way_in_without_a_token(
    zookeeper: EmbeddedZooKeeper, tmp_path: Path
) -> None:
    address = chroot(zookeeper)
    with with_page(address, tmp_path) as (server, url), client_of(address) as cluster:
        open_to_all = Paged(address, server, cluster, url)
        assert open_to_all.get("/overview.json", None)[0] == 200
        assert open_to_all.get("/overview.json", None, Host="evil.example:80")[0] == 421
        assert open_to_all.get("/nothing", None) == (
            404,
            "there is /, /healthz, /metrics, /overview.json, /readyz, /row.json, and no /nothing\n",
        )


def test_the_state_of_the_cluster_is_there_for_prometheus(paged: Paged) -> None:
    copy = LakeCopy(location="/lake/orders", format="delta", had_all_ms=1, batches={"shop": 1})
    [table] = [t for t in paged.overview()["tables"] if t["name"] == "orders"]
    paged.cluster.coordinator.copies.tell(table["id"], "c", copy)

    def metrics() -> dict[str, float]:
        status, body = paged.get("/metrics")
        assert status == 200
        lines = [line.rpartition(" ") for line in body.splitlines() if line[0] != "#"]
        return {name: float(value) for name, _, value in lines}

    wanted = 'tallybook_cluster_lake_lag_batches{copy="/lake/orders",table="orders"}'
    wait_until(lambda: wanted in metrics(), "the copy is seen")
    found = metrics()
    assert found[wanted] == 1
    assert found[wanted.replace("batches{", "seconds{")] > 1e9
    assert found["tallybook_cluster_reachable"] == 1
    assert found["tallybook_cluster_servers"] == 1
    assert found['tallybook_cluster_buckets_without_leader{table="orders"}'] == 0
    assert 0 < found['tallybook_cluster_lock_expires_seconds{owner="shop",table="orders"}'] <= 600
    assert {name.partition("{")[0] for name in found} - CLUSTER_METRICS == set()
    paged.cluster.coordinator.copies.forget(table["id"])
    wait_until(lambda: wanted not in metrics(), "the copy is forgotten")


def test_a_page_outside_of_the_servers_shows_the_same_and_says_when_it_cannot(
    paged: Paged,
) -> None:
    def connect_here() -> Cluster:
        return connect(paged.address, token=TOKEN, credentials=CREDENTIALS, deadline_s=5)

    with closing(page_of_cluster(connect_here, token="another")) as page:
        outside = Paged(paged.address, paged.server, paged.cluster, page.url)
        assert outside.get("/overview.json", TOKEN)[0] == 401
        status, body = outside.get("/overview.json", "another")
        assert status == 200
        assert [table["name"] for table in json.loads(body)["tables"]] == ["orders"]
        assert outside.get("/readyz", None) == (200, "ready\n")
        assert TOKEN not in body

    def nowhere() -> Cluster:
        raise Unavailable("there is no ZooKeeper")

    with closing(page_of_cluster(nowhere)) as page:
        lost = Paged(paged.address, paged.server, paged.cluster, page.url)
        assert lost.get("/readyz", None) == (503, "not ready: there is no ZooKeeper\n")
        assert lost.get("/healthz", None)[0] == 200
        assert "\ntallybook_cluster_reachable 0\n" in lost.get("/metrics", None)[1]
    with pytest.raises(InvalidInput, match="give it a token"):
        page_of_cluster(nowhere, host="0.0.0.0")
    port = int(paged.url.rstrip("/").rpartition(":")[2])
    with pytest.raises(InvalidInput, match=f":{port}: Address already in use. Choose another"):
        page_of_cluster(nowhere, port=port)


def test_a_page_says_soon_that_zookeeper_is_away_and_is_ready_again_with_it(
    zookeeper: EmbeddedZooKeeper, tmp_path: Path
) -> None:
    with (
        Proxy(zookeeper) as proxy,
        with_page(proxy.address, tmp_path) as (server, of_server),
        closing(page_of_cluster(lambda: connect(proxy.address))) as outside,
        client_of(zookeeper.address) as cluster,
    ):
        pages = [Paged(proxy.address, server, cluster, url) for url in (of_server, outside.url)]

        def all_say(path: str, words: str) -> bool:
            return all(words in page.get(path, None)[1] for page in pages)

        def is_reachable(number: int) -> bool:
            return all_say("/metrics", f"\ntallybook_cluster_reachable {number}\n")

        wait_until(lambda: is_reachable(1) and all_say("/readyz", "ready\n"), "all is well")
        proxy.refuse()
        wait_until(lambda: is_reachable(0), "it is told")
        wait_until(lambda: all_say("/readyz", "not ready: "), "no page is ready")
        assert all_say("/overview.json", f"ZooKeeper at {proxy.address} is away")
        proxy.accept()
        wait_until(lambda: is_reachable(1), "it is there again")
        wait_until(lambda: not all_say("/readyz", "not ready"), "and so are the pages")


def test_a_server_that_says_nothing_keeps_nobody_from_what_the_others_say(
    zookeeper: EmbeddedZooKeeper, tmp_path: Path
) -> None:
    address = chroot(zookeeper)
    with (
        with_page(address, tmp_path) as (server, url),
        client_of(address, attempt_s=3600.0) as cluster,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        page = Paged(address, server, cluster, url)
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        cluster.coordinator.servers.register(where)
        requests = StatusRequests(cluster.status_of)
        first, second = sorted(
            requests.of(cluster.server_addresses()), key=lambda one: one["address"] == where
        )
        assert (first["address"], first["problems"]) == (server.address, {})
        assert (second["address"], "no answer" in second["error"]) == (where, True)
        wait_until(
            lambda: "\ntallybook_cluster_servers_silent 1\n" in page.get("/metrics", None)[1],
            "it is counted",
        )
        assert "\ntallybook_cluster_servers 1\n" in page.get("/metrics", None)[1]
        requests.close()


@contextmanager
def browser_page(**settings: Any) -> Iterator[tuple[Any, list[str]]]:
    """Open a page in Chromium; yield it, and what it has complained of by then."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browser_path = shutil.which("chromium")
    if browser_path is None:
        pytest.skip("there is no chromium here (Debian's package has it)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(**settings)
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        yield page, wrong
        browser.close()


def test_the_page_shows_a_thousand_buckets_in_a_browser(paged: Paged) -> None:
    seen = paged.overview()
    [table] = [one for one in seen["tables"] if one["name"] == "orders"]
    [server] = seen["servers"]
    servers = [{**server, "address": f"host-{number}:9000"} for number in range(20)]
    buckets = [
        {**table["buckets"][0], "bucket": f"0/{n}", "server": servers[n % 20]["address"]}
        for n in range(999)
    ]
    lost = {"bucket": "0/999", "server": None, "why": "the disk is full"}
    event = {"at_ms": seen["at_ms"], "kind": "takeover", "of": "nobody"}
    copy = {
        "name": "c",
        "location": "/lake",
        "format": "delta",
        "lag_batches": 4,
        "lag_s": 1200.0,
        "told_s": 1200.0,
    }
    table |= {"buckets": [*buckets, lost], "copies": [copy], "sizes": [1, 5, 9]}
    table["locks"][0] |= {"events": [event], "uncommitted_buckets": 1, "uncommitted_s": 400.0}
    failed = {"call": "put", "error": "Overloaded", "times": 12, "last_ms": seen["at_ms"]}
    shown = {**seen, "servers": servers, "tables": [table], "errors": [failed]}
    with browser_page(http_credentials={"username": "me", "password": TOKEN}) as (page, wrong):
        page.route("**/overview.json", lambda route: route.fulfill(json=shown))
        page.goto(paged.url)
        page.get_by_text("something is wrong").wait_for(timeout=180_000)
        assert page.locator("#map .cell").count() == 1_000
        assert "the disk is full (0/999)" in page.locator("#problems").inner_text()
        assert "4 batches, 20 min" in page.locator("#lake").inner_text()
        assert "Overloaded" in page.locator("#errors").inner_text()
        assert "for 7 min" in page.locator("#locks").inner_text()
        titles = page.locator("#locks .timeline title").all_text_contents()
        assert titles == ["0.0 s ago: took over columns of nobody"]
        assert page.locator("#tables .spark polyline").count() == 1
        drawn_ms = page.evaluate(
            "(() => { const b = performance.now(); showMap(); return performance.now() - b; })()"
        )
        assert drawn_ms < 1_000
        assert wrong == []


@pytest.mark.parametrize("width", [1300, 1000])
def test_nothing_runs_over_its_card_however_long_names_are(paged: Paged, width: int) -> None:
    seen = paged.overview()
    [table] = [one for one in seen["tables"] if one["name"] == "orders"]
    owner = "orders-of-all-shops-and-warehouses-2026/streaming/eu-central-1"
    columns = ", ".join(f"amount_of_the_kind_{number}" for number in range(40))
    lock = {
        **table["locks"][0],
        "owner": owner,
        "query": "0f63b1f2-95ff-43a1-9d6c-4a9a0f5f4a3f",
        "query_name": "orders by shop <hourly>",
        "columns": columns,
        "events": [{"at_ms": seen["at_ms"] - 1_000, "kind": "batch", "batch": 7, "count": 1}],
    }
    expired = {**lock, "query_name": "", "state": "expired with debts"}
    table |= {"locks": [lock, expired]}
    problems = {"bucket 0/0": "/shared/logs/" + "a" * 300}
    shown = {**seen, "servers": [{**seen["servers"][0], "problems": problems}], "tables": [table]}
    settings: dict[str, Any] = {"http_credentials": {"username": "me", "password": TOKEN}}
    settings["viewport"] = {"width": width, "height": 900}
    with browser_page(**settings) as (page, wrong):
        page.route("**/overview.json", lambda route: route.fulfill(json=shown))
        page.goto(paged.url)
        page.get_by_text("something is wrong").wait_for(timeout=180_000)
        over = """[...document.querySelectorAll("section:not([hidden])")]
            .filter(one => one.scrollWidth > one.clientWidth).map(one => one.innerText)"""
        assert page.evaluate(over) == []
        right = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(right) == 0
        line, other = page.locator("#locks tbody tr").all()
        assert "orders by shop <hourly>" in line.inner_text()
        assert "query 0f63b1f2" in other.inner_text(), "a query without a name has its id"
        assert line.locator(".timeline").bounding_box()["width"] >= 150
        assert wrong == []


def _lab(colour: str) -> tuple[float, float, float]:
    """Return a colour as people see it: CIE L*a*b*, whose distances are those of the eye."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_tables_have_colours_that_differ(paged: Paged) -> None:
    seen = paged.overview()
    [table] = [one for one in seen["tables"] if one["name"] == "orders"]
    lost = {"bucket": "0/9", "server": None, "why": "the disk is full"}
    tables = [{**table, "name": f"t{n:02}", "id": n} for n in range(40)]
    tables[0] |= {"buckets": [*table["buckets"], lost]}
    with browser_page(http_credentials={"username": "me", "password": TOKEN}) as (page, wrong):
        page.route("**/overview.json", lambda route: route.fulfill(json={**seen, "tables": tables}))
        page.goto(paged.url)
        page.get_by_text("something is wrong").wait_for(timeout=180_000)
        style = "one => [getComputedStyle(one).backgroundColor, getComputedStyle(one).background]"
        swatches = [one.evaluate(style) for one in page.locator("#tables .swatch").all()]
        cells = {one.evaluate(style)[1] for one in page.locator("#map .cell").all()}
        bad = page.locator("#map .cell").last.evaluate(style)[0]
        assert len({background for _, background in swatches}) == len(tables)
        assert {background for _, background in swatches} < cells, "the same on both cards"
        first = [_lab(colour) for colour in [bad, *(colour for colour, _ in swatches[:10])]]
        closest = min(math.dist(one, other) for one, other in combinations(first, 2))
        assert closest > 25, "2 is what a good eye tells apart side by side"
        assert wrong == []


def test_the_page_shows_it_all_in_a_browser(paged: Paged) -> None:
    settings = {"http_credentials": {"username": "me", "password": TOKEN}}
    with browser_page(**settings) as (page, wrong):
        page.goto(paged.url)
        page.get_by_text("all is well").wait_for(timeout=180_000)
        assert page.locator("#map .cell").count() == 3
        assert page.locator("#locks").inner_text().count("shop") == 1
        page.locator("#tables").get_by_role("button", name="orders").click()
        page.get_by_label("customer (STRING)").fill(NASTY)
        page.get_by_label("day (DATE)").fill("2026-11-18")
        page.get_by_role("button", name="Look up").click()
        page.locator("#answer").get_by_text(NASTY).wait_for(timeout=180_000)
        assert page.title() == "Tallybook"
        page.locator("#charts svg polyline").first.wait_for(state="attached", timeout=180_000)
        assert wrong == []
