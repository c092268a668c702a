"""How a command reaches a cluster: what its options and the environment say."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from foundation.errors import InvalidInput
from server.client.cluster import Cluster, connect
from server.client.connections import ServerCredentials
from server.protocol.environment import TOKEN_VARIABLE, credentials_from


@dataclass(frozen=True, kw_only=True)
class Reach:
    """`deadline_s`: how long each step waits for an answer. Secrets come from the environment."""

    address: str
    token_file: Path | None
    tls_root: Path | None
    deadline_s: float

    def credentials(self, environment: Mapping[str, str] = os.environ) -> ServerCredentials:
        """Return what a server wants to see, and whom to trust."""
        token = environment.get(TOKEN_VARIABLE)
        if self.token_file is not None:
            token = _read_token(self.token_file)
        return ServerCredentials(token=token or None, tls_root=self.tls_root)

    def connect(self, environment: Mapping[str, str] = os.environ) -> Cluster:
        """Return a client of the cluster."""
        return connect(
            self.address,
            token=self.credentials(environment).token,
            tls_root=self.tls_root,
            credentials=credentials_from(environment),
            deadline_s=self.deadline_s,
            attempt_s=self.deadline_s,
        )


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except UnicodeDecodeError as exc:
        raise InvalidInput(f"the token file {path} has no text in it: {exc}") from exc
