"""The object store of a bed, a program of its own host: `python -m tests.multihost.s3`.

It keeps everything in memory, so it is never killed: whoever wants it away cuts it off, and whoever
wants it slow gives it a long cable.
"""

import signal

from tests.support.moto_server import S3Server, s3_server

HOST, PORT = "s3", 5000


def main() -> None:
    """Serve, with one bucket, until killed."""
    with s3_server(HOST, PORT) as server:
        print(server.create_bucket(), flush=True)
        signal.pause()


def settings() -> S3Server:
    """Return how others reach it."""
    return S3Server(f"http://{HOST}:{PORT}")


if __name__ == "__main__":
    main()
