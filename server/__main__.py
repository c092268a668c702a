"""A tablet server as a process: `python -m server --zookeeper ... --logs ... --views ...`."""

import argparse
import logging
import os
import sys
from pathlib import Path

from foundation.errors import TallybookError
from foundation.stop_signals import StopSignals
from merge_engine.bucket.options import BucketOptions
from server.launch.logs import NOT_STARTED, configure
from server.page.of_server import page_of
from server.protocol.environment import (
    ADDRESS_VARIABLE,
    TOKEN_VARIABLE,
    check_secret,
    credentials_from,
    find_address,
    token_from,
)
from server.tablet.config import HandOverConfig, ServerConfig, SnapshotConfig
from server.tablet.limits import Limits, ScannerLimits, SpoolLimits
from server.tablet.open_zookeeper import ALLOW
from server.tablet.tablet_server import TabletServer

_LOOK_S = 0.2


def parser() -> argparse.ArgumentParser:
    """Return the options of a server process."""
    options = argparse.ArgumentParser(prog="python -m server", description=__doc__)
    options.add_argument(
        "--zookeeper",
        help=f"host:port[,host:port...][/chroot]; or the variable {ADDRESS_VARIABLE}",
    )
    options.add_argument("--logs", required=True, help="where all servers' logs go: path or URL")
    options.add_argument("--views", required=True, type=Path, help="this server's own directory")
    options.add_argument("--host", default="127.0.0.1", help="other than loopback needs a token")
    options.add_argument("--port", type=int, default=0, help="0: any that is free")
    options.add_argument("--address-file", type=Path, help="where to write host:port when joined")
    options.add_argument("--metrics-port", type=int, help="serve Prometheus metrics; 0: any")
    options.add_argument("--page-port", type=int, help="serve the status page; 0: any")
    options.add_argument("--token-file", type=Path, help=f"or the variable {TOKEN_VARIABLE}")
    options.add_argument(
        ALLOW,
        action="store_true",
        help="with a token: even if others can create and drop tables in ZooKeeper",
    )
    options.add_argument("--tls-certificate", type=Path)
    options.add_argument("--tls-key", type=Path)
    options.add_argument(
        "--tls-root", type=Path, help="whom to trust among other servers; else its own"
    )
    options.add_argument(
        "--tls-client-ca", type=Path, help="who has to vouch for the certificates of clients"
    )
    options.add_argument("--session-timeout", type=float, default=10.0, help="seconds")
    options.add_argument(
        "--settle",
        type=float,
        default=HandOverConfig.settle_s,
        help="seconds without a server that comes or goes, before buckets move to even the load",
    )
    options.add_argument(
        "--drain-deadline",
        type=float,
        default=HandOverConfig.drain_s,
        help="seconds that a server which stops waits for others to take its buckets over",
    )
    options.add_argument("--max-puts", type=int, default=Limits.max_puts)
    options.add_argument("--max-bytes-in-flight", type=int, default=Limits.max_bytes_in_flight)
    options.add_argument("--lookup-max-keys", type=int, default=Limits.lookup_max_keys)
    options.add_argument(
        "--snapshot-interval", type=float, default=SnapshotConfig.interval_s, help="seconds"
    )
    options.add_argument(
        "--snapshots-retained", type=int, default=SnapshotConfig.retained, help="per bucket"
    )
    options.add_argument("--log-ttl", type=float, default=SnapshotConfig.log_ttl_s, help="seconds")
    options.add_argument("--scanner-ttl", type=float, default=ScannerLimits.ttl_s, help="seconds")
    options.add_argument("--scanners-per-bucket", type=int, default=ScannerLimits.max_per_bucket)
    options.add_argument("--scanners-per-server", type=int, default=ScannerLimits.max_per_server)
    options.add_argument(
        "--spool-max-bytes",
        type=int,
        default=SpoolLimits.max_bytes,
        help="what large puts may take of the disk of the views",
    )
    options.add_argument(
        "--spool-min-free-bytes",
        type=int,
        default=SpoolLimits.min_free_bytes,
        help="what they leave free of it",
    )
    options.add_argument("--put-max-rows", type=int, default=BucketOptions.put_max_rows)
    options.add_argument("--put-max-bytes", type=int, default=BucketOptions.put_max_bytes)
    options.add_argument("--working-set-bytes", type=int, default=BucketOptions.working_set_bytes)
    options.add_argument("--block-cache-bytes", type=int, default=BucketOptions.block_cache_bytes)
    options.add_argument("--write-buffer-bytes", type=int, default=BucketOptions.write_buffer_bytes)
    options.add_argument("--log-level", default="INFO")
    return options


def to_config(arguments: argparse.Namespace) -> ServerConfig:
    """Return the set-up that these options and the environment describe.

    Secrets come from files and the environment: options are seen by everybody on the machine.
    """
    token = token_from(os.environ)
    if arguments.token_file is not None:
        token = check_secret(arguments.token_file.read_text(), str(arguments.token_file))
    return ServerConfig(
        zookeeper=find_address(arguments.zookeeper, "--zookeeper", os.environ),
        logs=arguments.logs,
        views=arguments.views,
        host=arguments.host,
        port=arguments.port,
        token=token,
        tls_certificate=arguments.tls_certificate,
        tls_key=arguments.tls_key,
        tls_root=arguments.tls_root,
        tls_client_ca=arguments.tls_client_ca,
        metrics_port=arguments.metrics_port,
        credentials=credentials_from(os.environ),
        allow_open_zookeeper=arguments.allow_open_zookeeper,
        session_timeout_s=arguments.session_timeout,
        limits=Limits(
            max_puts=arguments.max_puts,
            max_bytes_in_flight=arguments.max_bytes_in_flight,
            lookup_max_keys=arguments.lookup_max_keys,
        ),
        scanners=ScannerLimits(
            ttl_s=arguments.scanner_ttl,
            max_per_bucket=arguments.scanners_per_bucket,
            max_per_server=arguments.scanners_per_server,
        ),
        spool=SpoolLimits(
            max_bytes=arguments.spool_max_bytes, min_free_bytes=arguments.spool_min_free_bytes
        ),
        snapshots=SnapshotConfig(
            interval_s=arguments.snapshot_interval,
            retained=arguments.snapshots_retained,
            log_ttl_s=arguments.log_ttl,
        ),
        hand_over=HandOverConfig(settle_s=arguments.settle, drain_s=arguments.drain_deadline),
        options=BucketOptions(
            put_max_rows=arguments.put_max_rows,
            put_max_bytes=arguments.put_max_bytes,
            working_set_bytes=arguments.working_set_bytes,
            block_cache_bytes=arguments.block_cache_bytes,
            write_buffer_bytes=arguments.write_buffer_bytes,
        ),
    )


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    arguments = parser().parse_args(argv)
    configure(arguments.log_level.upper())
    stop = StopSignals()
    sys.meta_path.insert(0, _NoPandas())
    try:
        config = to_config(arguments)
        with TabletServer(config) as server, page_of(server, config, arguments.page_port):
            if arguments.address_file is not None:
                _write_whole(arguments.address_file, server.address)
            while not server.told_to_drain and not stop.wait(_LOOK_S):
                pass
    except (TallybookError, OSError) as exc:
        print(f"{NOT_STARTED}{exc}", file=sys.stderr)
        return 1
    return 0


class _NoPandas:
    """Keeps pyarrow from importing pandas, which takes as long as all that a server needs.

    It would with the first put, to be ready for a data frame, and no server ever meets one.
    """

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("a server does without pandas", name=name)


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # All is closed. A call that a client still keeps open must not keep the process.
    os._exit(status)
