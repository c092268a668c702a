"""Look-ups from a web service: one connection for all threads, made when the process starts.

With a server that forks (gunicorn, uWSGI), connect in the worker, after the fork: `create_app` is
where. A server of ours that restarts is waited for: look-ups go on to its successor.
"""

import json
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import tallybook as tb
from examples.setting import Setting, alone

SCHEMA = (
    tb.SchemaBuilder()
    .column("customer_id", "BIGINT")
    .agg_column("points", "BIGINT", "sum")
    .primary_key("customer_id")
    .build()
)


def create_app(address: str) -> tuple[type[BaseHTTPRequestHandler], tb.Cluster]:
    """Return what answers `/points/NUMBER`, and the connection, to be closed in the end."""
    cluster = tb.connect(address)
    table = cluster.table("points")  # Safe for threads; look-ups of several go together.

    class Points(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            number = self.path.removeprefix("/points/")
            if not number.isdecimal():
                self.send_error(404)
                return
            try:
                [row] = table.lookup(
                    {"customer_id": [int(number)]}, isolation="committed"
                ).to_pylist()
            except tb.errors.Retryable as exc:
                self.send_error(503, "try again", str(exc))
                return
            body = json.dumps({"points": row["points"] or 0}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Points, cluster


def serve(setting: Setting) -> int:
    """Serve a thousand customers to a thousand requests of eight clients; return all points."""
    with tb.connect(setting.address) as writing:
        table = writing.create_table("points", SCHEMA, buckets=4)
        with table.writer(owner_id="shop", columns=["points"]) as writer:
            rows = {"customer_id": list(range(1000)), "points": list(range(1000))}
            writer.write(0, tb.Rows(data=rows))

        app, cluster = create_app(setting.address)
        with cluster, ThreadingHTTPServer(("127.0.0.1", 0), app) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            place = f"http://127.0.0.1:{server.server_address[1]}/points"

            def ask(number: int) -> int:
                with urllib.request.urlopen(f"{place}/{number}", timeout=30) as answer:
                    return int(json.loads(answer.read())["points"])

            with ThreadPoolExecutor(8) as clients:
                total = sum(clients.map(ask, range(1000)))
            server.shutdown()
        print(f"1,000 requests, {total:,} points")
        return total


if __name__ == "__main__":
    alone(serve)
