"""Where a client's daemon is and how it is spoken to: what `Client` and `AsyncClient` have in common."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from qkvd.calls import checked_timeout, not_negative_number
from qkvd.errors import InvalidArgument
from qkvd.place import MOST

DEFAULT_TARGET = "127.0.0.1:7580"
DEFAULT_TIMEOUT = 60.0  # seconds
DEFAULT_RETRY = 5.0
TOKEN_FILE_SECONDS = 1.0  # between two looks at a token file
# Earlier versions of gRPC do not work in the child of a process that has used it: calls hang or the child crashes.
SERVES_CHILDREN = tuple(map(int, grpc.__version__.split(".")[:2])) >= (1, 80)
_TOKEN = re.compile(r"[!-~]+")
_TENANT = re.compile(r"[A-Za-z0-9._:/@-]{1,128}")
KEY = "x-qkv-session"  # metadata by which a proxy places a call
_TARGET = re.compile(r"unix:.+|[^:/]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\]:[0-9]{1,5}")


def keep_freed_memory() -> None:
    """Has glibc's malloc keep what messages leave behind.

    Until malloc has freed a block that it had mapped by itself, it gives freed memory at the end of an arena back to the
    kernel from 128 KiB on, and takes it anew, as pages of zeros, for the next message. From there on it keeps twice the
    block's bytes. So one block is freed, of which no page is touched. Limits that the program or its environment have set
    stay as they are (docs/python.md).
    """
    np.empty(8 << 20, np.uint8)


keep_freed_memory()


@dataclass(frozen=True, kw_only=True)
class Tls:
    """PEM files for TLS; what is None is the system's (`ca`) or absent (a client certificate)."""

    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None
    server_name: str | None = None  # that the daemon's certificate is for, where it is not the target's

    def credentials(self) -> grpc.ChannelCredentials:
        """gRPC's own; reads the files. InvalidArgument: a certificate without its key, or a file that cannot be read."""
        if (self.certificate is None) != (self.key is None):
            raise InvalidArgument("tls: certificate and key come together")
        ca, key, certificate = (
            None if path is None else read_file(path, f"tls: {name}")
            for name, path in (("ca", self.ca), ("key", self.key), ("certificate", self.certificate))
        )
        return grpc.ssl_channel_credentials(ca, key, certificate)


def read_file(path: str | Path, name: str) -> bytes:
    """Its bytes, or InvalidArgument, which names what it is for."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{name} cannot be read: {error}") from error


class TokenFile:
    """A token that is renewed in its file, as the kubelet does: it is looked at once a second at most."""

    def __init__(self, path: str | Path):
        self._path = Path(path)
        self._seen: tuple[int, int] | None = self._written()
        self._next = time.monotonic() + TOKEN_FILE_SECONDS
        self._token = _checked_token(self._read())

    def _written(self) -> tuple[int, int] | None:
        try:
            info = self._path.stat()
        except OSError:
            return None
        return info.st_ino, info.st_mtime_ns

    def _read(self) -> str:
        return read_file(self._path, "token_file").decode(errors="replace").strip()

    def token(self) -> str:
        """The file's; what cannot be read, or is no token, leaves the one before in use."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + TOKEN_FILE_SECONDS
            written = self._written()
            if written is not None and written != self._seen:
                with contextlib.suppress(InvalidArgument):  # it may be in the middle of being written, and counts as unread
                    self._token = _checked_token(self._read())
                    self._seen = written
        return self._token


def _checked_token(token: str) -> str:
    if not _TOKEN.fullmatch(token):
        raise InvalidArgument("token is empty, or has other characters than visible ones of ASCII")
    return token


class Connection:
    """Settings of a client. Nothing is opened before the first call."""

    def __init__(
        self,
        target: str,
        tenant: str,
        token: str | None,
        tls: Tls | bool | None,
        timeout: float,
        retry_for: float,
        placement: str = "",
        token_file: str | Path | None = None,
    ):
        self.targets = _targets_of(target)
        if placement and not _TENANT.fullmatch(placement):
            raise InvalidArgument(f"placement is {placement!r}, allowed are 1 to 128 letters, digits and ._:/@-")
        if tenant and not _TENANT.fullmatch(tenant):
            raise InvalidArgument(f"tenant is {tenant!r}, allowed are 1 to 128 letters, digits and ._:/@-")
        if token is not None and token_file is not None:
            raise InvalidArgument("token and token_file are both given")
        self.target = target
        self.placement = placement
        self.tenant = tenant
        self._token = None if token is None else _checked_token(token)
        self._token_file = None if token_file is None else TokenFile(token_file)
        self.timeout = checked_timeout(timeout)
        self.retry_for = not_negative_number(retry_for, "retry_for")
        self.tls = Tls() if tls is True else tls or None
        local = next((one for one in self.targets if one.startswith("unix:")), None)
        if self.tls and local:
            raise InvalidArgument(f"tls is given, target {local} has none: it is for HOST:PORT")
        self.credentials = self.tls.credentials() if self.tls else None

    def __getstate__(self) -> Any:
        """Refused."""
        raise TypeError(
            "what has a connection to qkvd cannot be pickled or copied: make a client of its own in the other process"
        )

    @property
    def token(self) -> str | None:
        """That of calls to come."""
        return self._token_file.token() if self._token_file else self._token

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of a call."""
        token = self.token
        return ((("qkv-tenant", self.tenant),) if self.tenant else ()) + (
            (("authorization", f"Bearer {token}"),) if token is not None else ()
        )

    def metadata_of(self, key: str | None) -> tuple[tuple[str, str], ...]:
        """Of a call for this session, or for the placement. A name that no session has goes without."""
        key = self.placement or key
        return (*self.metadata, (KEY, key)) if key and _TENANT.fullmatch(key) else self.metadata

    def options(self) -> list[tuple[str, int | str]]:
        """Of a channel."""
        options: list[tuple[str, int | str]] = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            # A connection of its own: neither shared with other clients nor, after fork(), with the parent.
            ("grpc.use_local_subchannel_pool", 1),
            # A daemon that comes back is found soon.
            ("grpc.initial_reconnect_backoff_ms", 50),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        if self.tls and self.tls.server_name:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options


def _targets_of(target: str) -> list[str]:
    targets = target.split(",")
    for one in targets:
        if not _TARGET.fullmatch(one):
            raise InvalidArgument(f"target is {one!r}, allowed are unix:PATH and HOST:PORT, or several with commas")
        if len(targets) > 1 and len(one.encode()) > MOST:
            raise InvalidArgument(f"a target has {len(one.encode())} bytes, of several at most {MOST} are possible")
    if len(set(targets)) < len(targets):
        raise InvalidArgument(f"target is {target!r}, one of them is there twice")
    return targets
