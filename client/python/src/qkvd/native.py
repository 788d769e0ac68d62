"""libqkv for what moves many rows, where the package qkvd-native is installed.

Each client keeps a few handles of libqkv, one for each call at a time. What libqkv does not do (rows with the heads first,
TLS by the system's authorities or for another server name), and what has failed by it, goes by grpcio: callers see the
same errors either way.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from qkvd import wire
from qkvd.arrays import NUMPY_OF, Array, WireTensor, as_numpy
from qkvd.connection import Connection, Tls
from qkvd.errors import DeadlineExceeded, Error, InvalidArgument, Unimplemented, of_number
from qkvd.items import NATIVE_BYTES, ROPE_FORMS, Packed, append_groups
from qkvd.locks import Lock, calls_under_way
from qkvd.v1 import model_pb2

IDLE = 4  # handles that a client keeps
CONNECT_MS = 1000  # a daemon that is slower to connect to is reached by grpcio
THREADS_MOST = 64
UNFIT = (OverflowError, IndexError, TypeError, ValueError)  # of arguments that C has no place for

_used_by = 0  # the process whose libqkv is at work: a child's lacks gRPC's threads


def _library() -> Any:
    """The module, or None where it is not installed. Nothing is loaded before it is asked for."""
    try:
        return importlib.import_module("qkvd_native")
    except ImportError:
        return None


def installed() -> bool:
    """Whether qkvd-native can be imported."""
    return _library() is not None


class Native:
    """The handles of one client.

    wanted: None, where installed; False: never; True: Unimplemented where it cannot be.
    """

    def __init__(self, connection: Connection, wanted: bool | None):
        self._connection = connection
        self._lock = Lock()
        self._idle: list[Any] = []
        self._token = connection.token  # of the idle handles
        self._closed = False
        self._why = self._reason(wanted)
        if wanted and self._why and len(connection.targets) == 1:
            raise Unimplemented(self._why)

    def _reason(self, wanted: bool | None) -> str:
        """Why libqkv is not used; "" where it is."""
        if wanted is False:
            return "native=False was given to the client"
        if len(self._connection.targets) > 1:
            return "it is each daemon's own"
        tls = self._connection.tls
        if tls and (tls.ca is None or tls.server_name):
            return "libqkv takes TLS only with a `ca`, and no `server_name`"
        # Whether it is installed is asked when it is needed.
        return "qkvd-native is not installed" if wanted and _library() is None else ""

    def usable(self) -> bool:
        """Whether calls of this process may go by libqkv."""
        if self._why or self._closed or _used_by not in (0, os.getpid()) or not calls_under_way.usable:
            return False
        if _library() is None:
            self._why = "qkvd-native is not installed"
        return not self._why

    def demand(self) -> None:
        """Raises Unimplemented where `usable` is False."""
        if not self.usable():
            raise Unimplemented(f"coded transfers go by libqkv: {self._why or 'which a child of fork() cannot use'}")

    def close(self) -> None:
        """Closes the handles that nobody uses; the others close after their calls."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        if _used_by == os.getpid():
            for handle in idle:
                handle.close()

    @contextmanager
    def _handle(self, timeout: float) -> Iterator[Any]:
        """A handle for one call. Errors of libqkv are raised as ours."""
        global _used_by
        library = _library()
        timeout_ms = max(min(int(timeout * 1000), 2**31), 1)
        with calls_under_way:
            _used_by = os.getpid()
            try:
                token = self._connection.token
                handle = self._take(token)
                if handle is not None:
                    handle.set_timeout(timeout_ms)
                else:
                    to = self._connection
                    tls = to.tls or Tls()
                    handle = library.Handle(
                        to.target, tenant=to.tenant, placement=to.placement, timeout_ms=timeout_ms,
                        connect_timeout_ms=min(timeout_ms, CONNECT_MS), token=token,
                        tls_ca=tls.ca, tls_cert=tls.certificate, tls_key=tls.key,
                    )  # fmt: skip
                try:
                    yield handle
                finally:
                    self._give_back(handle, token)
            except library.Error as error:
                raise of_number(error.code, error.text) from None

    def _take(self, token: str | None) -> Any:
        with self._lock:
            stale = []
            if token != self._token:  # a renewed token is that of new handles
                stale, self._idle, self._token = self._idle, [], token
            handle = self._idle.pop() if self._idle else None
        for old in stale:
            old.close()
        return handle

    def _give_back(self, handle: Any, token: str | None) -> None:
        with self._lock:
            keep = not self._closed and len(self._idle) < IDLE and token == self._token
            if keep:
                self._idle.append(handle)
        if not keep:
            handle.close()

    # ---- rows in ----

    def append(self, items: Sequence[Packed], timeout: float) -> int | None:
        """Appends rows; gives new tokens, or None where it has failed: the caller does it again by grpcio."""
        until = time.monotonic() + timeout
        new = 0
        try:
            with self._handle(timeout) as handle:
                for group in append_groups(items, NATIVE_BYTES):
                    if time.monotonic() > until:
                        raise DeadlineExceeded("")
                    new += handle.append([self._rows(packed) for packed in group])
        except (Error, *UNFIT) as error:
            _check_deadline(error, "Append", until, timeout)
            return None
        return new

    def append_encoded(self, packed: Packed, threads: int, timeout: float) -> int:
        """Appends one item's rows as pages that are coded here."""
        self.demand()
        with self._handle(timeout) as handle:
            return int(handle.append_encoded(self._rows(packed), checked_threads(threads)))

    def _rows(self, packed: Packed) -> Any:
        library = _library()
        item = packed.item
        if packed.k is None or packed.v is None:
            raise InvalidArgument("k and v come together")
        if item.rope not in ROPE_FORMS:
            raise InvalidArgument(f'rope is {item.rope!r}, allowed are "after" and "before"')
        ids = None
        if item.tokens is not None:
            given = isinstance(item.tokens, np.ndarray) and item.tokens.dtype == np.uint32
            ids = np.ascontiguousarray(item.tokens if given else wire.checked_ids(item.tokens), np.uint32)
            if len(ids) != packed.k.dims[0]:
                raise InvalidArgument(f"tokens has {len(ids)} ids, k has {packed.k.dims[0]} tokens")
        return library.Rows(
            item.session, item.layer, item.position, _tensor(library, packed.k), _tensor(library, packed.v),
            item.rope == "before", ids,
        )  # fmt: skip

    # ---- rows out ----

    def fetch(
        self,
        session: str,
        layer: int,
        to: tuple[Array, Array],
        begin: int,
        end: int,
        dtype: int,
        before: bool,
        timeout: float,
    ) -> int | None:
        """Rows of a layer into two arrays, from their first row on: how many, or None where that has failed."""
        until = time.monotonic() + timeout
        try:
            with self._handle(timeout) as handle:
                came = handle.fetch_into(session, layer, *to, begin=begin, end=end, dtype=dtype, before_rope=before)
        except (Error, *UNFIT) as error:
            _check_deadline(error, "Fetch", until, timeout)
            return None
        for array, (its, heads, dim) in zip(to, (came.k, came.v), strict=True):
            if came.tokens and (NUMPY_OF.get(its) != array.dtype or array.shape[1:] != (heads, dim)):
                return None  # grpcio says what is wrong
        return int(came.tokens)

    def fetch_decoded(
        self, session: str, layer: int, to: tuple[Array, Array], threads: int, begin: int, end: int, dtype: int,
        before: bool, timeout: float,
    ) -> int:  # fmt: skip
        """The same by pages, which are decoded here."""
        self.demand()
        with self._handle(timeout) as handle:
            _, tokens = handle.fetch_decoded(
                session, layer, *to, min(len(to[0]), len(to[1])), checked_threads(threads),
                begin=begin, end=end, dtype=dtype, before_rope=before,
            )  # fmt: skip
            return int(tokens)


def _check_deadline(error: Exception, method: str, until: float, timeout: float) -> None:
    """Raises where the call's time is over: there is none to do it again."""
    if isinstance(error, DeadlineExceeded) or time.monotonic() >= until:
        raise DeadlineExceeded(f"{method} was not answered within {timeout:g} s") from None


def checked_threads(threads: int) -> int:
    """A number of threads, or InvalidArgument."""
    if not 1 <= threads <= THREADS_MOST:
        raise InvalidArgument(f"coded is {threads}, allowed are 1 to {THREADS_MOST} threads")
    return threads


def _tensor(library: Any, tensor: WireTensor) -> Any:
    if tensor.place is not None:
        raise InvalidArgument("rows in a region cannot be encoded here")
    return library.Tensor(int(tensor.dtype), tensor.dims, tensor.strides, tensor.data)


def places(
    out: tuple[Any, Any] | None, tokens: int, dtype: int, model: model_pb2.Model
) -> tuple[tuple[Array, Array], int] | None:
    """Arrays for rows of the model, the caller's or new ones, and their dtype's number; None where `out` does not fit."""
    number = dtype or int(model.dtype)
    element = NUMPY_OF[number]
    shapes = ((model.kv_heads, model.key_dim), (model.kv_heads, model.value_dim))
    if out is None:
        return (np.empty((tokens, *shapes[0]), element), np.empty((tokens, *shapes[1]), element)), number
    k, v = as_numpy(out[0], "out[0]"), as_numpy(out[1], "out[1]")
    for array, shape in ((k, shapes[0]), (v, shapes[1])):
        if array.ndim != 3 or array.shape[1:] != shape or array.dtype != element:
            return None
        if not array.flags.c_contiguous or not array.flags.writeable:
            return None
    return (k, v), number
