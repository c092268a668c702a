"""How to reach a cluster: by arguments, else by the environment, else by a small file.

The file is TOML, at `~/.config/tallybook/config.toml` or where TALLYBOOK_CONFIG says:

    zookeeper = "zk1:2181,zk2:2181/tallybook"
    token_file = "token"                      what servers want to see
    tls_root = "ca.pem"                       whom to trust, for servers with TLS
    tls_certificate = "me.pem"                what servers see that want to know who calls
    tls_key = "me.key"
    credentials_file = "zookeeper-user"       user:password for ZooKeeper

All may be left out; paths are below the file's own directory, unless they say otherwise. What the
file says of secrets is for the cluster that the file names: who connects elsewhere sends none.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation.errors import InvalidInput
from foundation.suggestions import did_you_mean
from server.client.cluster import PATIENCE_S, Cluster
from server.client.cluster import connect as connect_to
from server.client.connections import ServerCredentials
from server.protocol.environment import (
    ADDRESS_VARIABLE,
    CREDENTIALS_VARIABLE,
    TLS_CERTIFICATE_VARIABLE,
    TLS_KEY_VARIABLE,
    TOKEN_VARIABLE,
    check_secret,
    credentials_from,
    read_credentials,
    token_from,
)

CONFIG_VARIABLE = "TALLYBOOK_CONFIG"
DEFAULT_CONFIG = Path("~/.config/tallybook/config.toml")
_KEYS = (
    "zookeeper",
    "token_file",
    "tls_root",
    "tls_certificate",
    "tls_key",
    "credentials_file",
)


def connect(
    address: str | None = None,
    *,
    token: str | None = None,
    tls_root: str | Path | None = None,
    tls_certificate: str | Path | None = None,
    tls_key: str | Path | None = None,
    credentials: tuple[str, str] | None = None,
    deadline_s: float = 30.0,
    attempt_s: float = 10.0,
    storage_settings: Mapping[str, Any] | None = None,
    patience_s: float | None = PATIENCE_S,
) -> Cluster:
    """Connect to the cluster whose ZooKeeper is at `host:port[,host:port...][/chroot]`.

    What is not given is taken from the environment (TALLYBOOK_ZOOKEEPER, TALLYBOOK_TOKEN,
    TALLYBOOK_ZOOKEEPER_CREDENTIALS), and then from the file `~/.config/tallybook/config.toml`.
    `token`, `tls_root`: for servers that want a token, and that speak TLS; `tls_certificate` and
    `tls_key`: for those that want to see a client's. `credentials`: user and password for
    ZooKeeper. `deadline_s`: how long a call looks for a leader that answers; `attempt_s`: how long
    it waits for one answer. `storage_settings`: what obstore needs to reach the cluster's object
    store, for scans of snapshots, which read it themselves. `patience_s`: how long to look for a
    ZooKeeper where there is none at all, and for a cluster below the chroot.
    """
    reach = find_reach(
        address,
        how="an argument of connect",
        tls_root=tls_root,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
    )
    return reach.connect(
        token=token,
        credentials=credentials,
        attempt_s=attempt_s,
        deadline_s=deadline_s,
        storage_settings=storage_settings,
        patience_s=patience_s,
    )


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Where a cluster is, and where the secrets are that open it.

    `deadline_s`: how long each step waits for an answer. Secrets come from files, or from the
    environment; a file is taken first.
    """

    address: str
    token_file: Path | None = None
    tls_root: Path | None = None
    deadline_s: float = 30.0
    credentials_file: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None

    def credentials(self, environment: Mapping[str, str] = os.environ) -> ServerCredentials:
        """Return what a server wants to see, and whom to trust."""
        if self.token_file is not None:
            token: str | None = read_secret(self.token_file, "token")
        else:
            token = token_from(environment)
        return ServerCredentials(
            token=token,
            tls_root=self.tls_root,
            tls_certificate=self.tls_certificate,
            tls_key=self.tls_key,
        )

    def zookeeper_credentials(
        self, environment: Mapping[str, str] = os.environ
    ) -> tuple[str, str] | None:
        """Return user and password for ZooKeeper, if there are any."""
        if self.credentials_file is not None:
            where = f"the credentials file {self.credentials_file}"
            return read_credentials(read_secret(self.credentials_file, "credentials"), where)
        return credentials_from(environment)

    def connect(
        self,
        environment: Mapping[str, str] = os.environ,
        *,
        token: str | None = None,
        credentials: tuple[str, str] | None = None,
        **settings: Any,
    ) -> Cluster:
        """Return a client of the cluster; `settings` are those of `connect`."""
        deadline_s = settings.pop("deadline_s", self.deadline_s)
        return connect_to(
            self.address,
            token=token or self.credentials(environment).token,
            tls_root=self.tls_root,
            tls_certificate=self.tls_certificate,
            tls_key=self.tls_key,
            credentials=credentials or self.zookeeper_credentials(environment),
            deadline_s=deadline_s,
            attempt_s=settings.pop("attempt_s", deadline_s),
            **settings,
        )


def find_reach(
    address: str | None = None,
    *,
    how: str,
    token_file: str | Path | None = None,
    tls_root: str | Path | None = None,
    tls_certificate: str | Path | None = None,
    tls_key: str | Path | None = None,
    deadline_s: float = 30.0,
    environment: Mapping[str, str] = os.environ,
) -> Reach:
    """Return how to reach a cluster: what is not given is looked for, as the module says.

    `how`: in which way the address can be given, for the error of whoever has none.
    """
    if not isinstance(address, str | None):
        raise InvalidInput(f"ZooKeeper's address is a text, host:port, not {address!r}")
    path, file = _config(environment)
    wanted = address or environment.get(ADDRESS_VARIABLE) or file.get("zookeeper")
    if not wanted:
        raise InvalidInput(
            f"ZooKeeper's address is missing: give it as {how}, in the variable "
            f"{ADDRESS_VARIABLE}, or as `zookeeper` in {path}"
        )
    ours = file if file.get("zookeeper", wanted) == wanted else {}

    def below(key: str) -> Path | None:
        return path.parent / Path(ours[key]).expanduser() if key in ours else None

    has_token, has_credentials = TOKEN_VARIABLE in environment, CREDENTIALS_VARIABLE in environment
    root = _path(tls_root) or below("tls_root")

    def shown(given: str | Path | None, variable: str, key: str) -> Path | None:
        """What a client shows goes with whom it trusts: without TLS nobody wants to see it."""
        elsewhere = environment.get(variable) if root is not None else None
        return _path(given or elsewhere) or below(key)

    return Reach(
        address=wanted,
        token_file=_path(token_file) or (None if has_token else below("token_file")),
        tls_root=root,
        tls_certificate=shown(tls_certificate, TLS_CERTIFICATE_VARIABLE, "tls_certificate"),
        tls_key=shown(tls_key, TLS_KEY_VARIABLE, "tls_key"),
        deadline_s=deadline_s,
        credentials_file=None if has_credentials else below("credentials_file"),
    )


def known_address(
    address: str | None = None, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return ZooKeeper's address as it was given, or is found; None if nothing says where it is."""
    return address or environment.get(ADDRESS_VARIABLE) or _config(environment)[1].get("zookeeper")


def read_secret(path: Path, what: str) -> str:
    """Return the text of a file; InvalidInput if there is none, or it cannot be read."""
    try:
        return check_secret(path.read_text(), f"the {what} file {path}")
    except UnicodeDecodeError as exc:
        raise InvalidInput(f"the {what} file {path} has no text in it: {exc}") from exc
    except OSError as exc:
        raise InvalidInput(f"the {what} file {path} cannot be read: {exc.strerror}") from exc


def _path(given: str | Path | None) -> Path | None:
    if not isinstance(given, str | Path | None):
        raise InvalidInput(f"a file is given by its path, not as {given!r}")
    return None if given is None else Path(given)


def _config(environment: Mapping[str, str]) -> tuple[Path, dict[str, str]]:
    """Return where the file is, or would be, and what it says; InvalidInput if that is wrong."""
    named = environment.get(CONFIG_VARIABLE)
    try:
        path = Path(named or DEFAULT_CONFIG).expanduser()
    except RuntimeError:  # Somebody without a home.
        return DEFAULT_CONFIG, {}
    try:
        values = tomllib.loads(path.read_text())
    except FileNotFoundError as exc:
        if named:
            raise InvalidInput(f"{CONFIG_VARIABLE} names {path}: there is no such file") from exc
        return path, {}
    except OSError as exc:
        raise InvalidInput(f"{path} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:  # No TOML, or no text.
        raise InvalidInput(f"{path} is not TOML: {exc}") from exc
    for key, value in values.items():
        if key not in _KEYS:
            raise InvalidInput(
                f"{path}: there is no setting '{key}'"
                + (did_you_mean(key, _KEYS) or f"; there are {', '.join(_KEYS)}")
            )
        if not isinstance(value, str):
            raise InvalidInput(f"{path}: {key} is a text, not {value!r}")
    return path, values
