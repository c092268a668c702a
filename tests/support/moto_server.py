"""An S3 API for tests, on loopback unless told otherwise: moto, in a thread of this process."""

import logging
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class S3Server:
    """A running server: `settings` open storages on it, `create_bucket` makes room for them."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._lock = threading.Lock()
        self._buckets = 0

    @property
    def settings(self) -> dict[str, Any]:
        """What `open_storage` needs besides the URL. The credentials are made up."""
        return {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": "test",
            "secret_access_key": "test",
            "client_options": {"allow_http": True, "timeout": "20s"},
            "retry_config": {"max_retries": 0},
        }

    @property
    def variables(self) -> dict[str, str]:
        """The same for the environment of a process that is given the URL only."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }

    def create_bucket(self) -> str:
        """Create a new, empty bucket and return its URL."""
        with self._lock:
            self._buckets += 1
            name = f"tallybook-{self._buckets}"
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=180):
            return f"s3://{name}"


@contextmanager
def s3_server(host: str = "127.0.0.1", port: int = 0) -> Iterator[S3Server]:
    """Run an S3 server for the duration of the block; port 0 is any that is free."""
    from moto.server import ThreadedMotoServer  # noqa: PLC0415

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address=host, port=port, verbose=False)
    server.start()
    http: Any = server._server
    http.app = _one_at_a_time(http.app)
    try:
        yield S3Server("http://{}:{}".format(*server.get_host_and_port()))
    finally:
        server.stop()
        http.server_close()


def _one_at_a_time(app: Callable[..., Any]) -> Callable[..., Any]:
    """Serve one request after the other.

    S3 decides a conditional put in one step; moto looks first and stores later.
    """
    lock = threading.Lock()

    def serve(environ: Any, start_response: Any) -> Any:
        with lock:
            return app(environ, start_response)

    return serve
