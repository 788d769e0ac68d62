"""libqkv for Python: the calls that move many rows. The package `qkvd` uses it where it is installed.

A call releases the interpreter's lock, takes rows from where they lie, and puts them where they belong. A `Handle` is one
connection, for one thread at a time. A process that was forked from one that had handles cannot use it: gRPC's threads
stay behind.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from qkvd_native import _qkv

__version__ = "0.1.0"
__all__ = ["Came", "Error", "Handle", "Rows", "Tensor"]

_ffi: Any = _qkv.ffi
_lib: Any = _qkv.lib


class Error(Exception):
    """A call has failed: gRPC's number of the status, and what libqkv or the daemon says."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code = code
        self.text = text


class Tensor(NamedTuple):
    """Rows [tokens, heads, dim] in the caller's memory. `data`: anything with a buffer in one piece."""

    dtype: int  # 1: fp32, 2: fp16, 3: bf16
    dims: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes; () where dense
    data: Any


class Rows(NamedTuple):
    """What is appended to one layer of one session."""

    session: str
    layer: int
    position: int
    k: Tensor
    v: Tensor
    before_rope: bool = False
    token_ids: Any = None  # a buffer of uint32, one a token


class Came(NamedTuple):
    """What a fetch has put into memory. `k` and `v` are (dtype, heads, dim)."""

    position: int
    tokens: int
    k: tuple[int, int, int]
    v: tuple[int, int, int]


class _Failure:
    """Where a call's error goes."""

    def __init__(self) -> None:
        self.place = _ffi.new("qkv_call_error *")

    def check(self, code: int) -> None:
        if code:
            raise Error(code, _ffi.string(self.place.text).decode(errors="replace"))


class Handle:
    """A connection to the daemon at `target`, "unix:PATH" or "HOST:PORT". Error: nobody answers there.

    timeout_ms: of every call, and of each response of a fetch. token: the bearer token of every call. tls_ca, tls_cert,
    tls_key: PEM files, read here; without `tls_ca` there is no TLS.
    """

    def __init__(
        self,
        target: str,
        *,
        tenant: str = "",
        placement: str = "",
        timeout_ms: int = 60000,
        connect_timeout_ms: int = 1000,
        token: str | None = None,
        tls_ca: str | os.PathLike[str] | None = None,
        tls_cert: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
    ):
        texts = {
            "tenant": tenant, "placement": placement, "token": token, "tls_ca": tls_ca, "tls_cert": tls_cert,
            "tls_key": tls_key,
        }  # fmt: skip
        places = {name: _ffi.new("char[]", os.fsencode(text)) for name, text in texts.items() if text}
        options = _ffi.new(
            "qkv_client_options *", {"timeout_ms": timeout_ms, "connect_timeout_ms": connect_timeout_ms} | places
        )
        self._place = _ffi.new("qkv_client **")
        failure = _Failure()
        failure.check(_lib.qkv_client_connect(target.encode(), options, self._place, failure.place))
        self._end = weakref.finalize(self, _close, self._place, os.getpid())
        self._end.atexit = False

    def set_timeout(self, timeout_ms: int) -> None:
        """Of the calls to come."""
        _lib.qkv_client_set_timeout(self._place[0], timeout_ms)

    def close(self) -> None:
        """Closes the connection, as the end of the object does; sessions stay open in the daemon."""
        self._end()

    def append(self, rows: Sequence[Rows]) -> int:
        """Appends in one message; gives how many tokens were new."""
        keep: list[Any] = []
        items = _ffi.new("qkv_client_item[]", len(rows))
        for item, one in zip(items, rows, strict=True):
            _fill_item(item, one, keep)
        appended, failure = _ffi.new("uint64_t *"), _Failure()
        failure.check(_lib.qkv_client_append(self._place[0], items, len(rows), appended, failure.place))
        return int(appended[0])

    def append_encoded(self, rows: Rows, threads: int) -> int:
        """Appends pages that are coded here, on `threads` threads, and the rows that belong to none as rows."""
        keep: list[Any] = []
        item = _ffi.new("qkv_client_item *")
        _fill_item(item, rows, keep)
        appended, failure = _ffi.new("uint64_t *"), _Failure()
        failure.check(_lib.qkv_client_append_encoded(self._place[0], item, threads, appended, failure.place))
        return int(appended[0])

    def fetch_into(
        self,
        session: str,
        layer: int,
        k: Any,
        v: Any,
        *,
        begin: int = 0,
        end: int = 0,
        dtype: int = 0,
        before_rope: bool = False,
    ) -> Came:
        """Rows of a layer into `k` and `v`, writable buffers; their first rows are filled. dtype 0: the model's."""
        keep: list[Any] = []
        request = _request(session, layer, begin, end, dtype, before_rope, keep)
        place = _ffi.new("qkv_client_layer_memory *")
        for memory, buffer in ((place.k, k), (place.v, v)):
            data = _ffi.from_buffer("char[]", buffer, require_writable=True)
            keep.append(data)
            memory.data, memory.bytes = data, len(data)
        failure = _Failure()
        failure.check(_lib.qkv_client_fetch_into(self._place[0], request, place, failure.place))
        return Came(place.position, place.tokens, _shape(place.k), _shape(place.v))

    def fetch_decoded(
        self,
        session: str,
        layer: int,
        k: Any,
        v: Any,
        capacity: int,
        threads: int,
        *,
        begin: int = 0,
        end: int = 0,
        dtype: int,
        before_rope: bool = False,
    ) -> tuple[int, int]:
        """Pages of a layer, decoded on `threads` threads into `k` and `v`, which hold `capacity` rows of the model's shape
        and of `dtype`: (position of the first, tokens)."""
        keep: list[Any] = []
        request = _request(session, layer, begin, end, dtype, before_rope, keep)
        place = _ffi.new("qkv_client_layer_rows *")
        keep += (_ffi.from_buffer("char[]", buffer, require_writable=True) for buffer in (k, v))
        place.k, place.v = keep[-2:]
        place.k_bytes, place.v_bytes = len(keep[-2]), len(keep[-1])
        place.capacity = capacity
        failure = _Failure()
        failure.check(_lib.qkv_client_fetch_decoded(self._place[0], request, threads, place, failure.place))
        return place.position, place.tokens


def _close(place: Any, process: int) -> None:
    """Not in a child of fork()."""
    if process == os.getpid():
        _lib.qkv_client_close(place)


def _shape(memory: Any) -> tuple[int, int, int]:
    return memory.dtype, memory.heads, memory.dim


def _text(text: str, keep: list[Any]) -> Any:
    place = _ffi.new("char[]", text.encode())
    keep.append(place)
    return place


def _request(session: str, layer: int, begin: int, end: int, dtype: int, before_rope: bool, keep: list[Any]) -> Any:
    layers = _ffi.new("uint32_t[1]", [layer])
    keep.append(layers)
    return _ffi.new(
        "qkv_client_fetch *",
        {
            "session": _text(session, keep), "layers": layers, "layer_count": 1, "begin": begin, "end": end,
            "dtype": dtype, "before_rope": before_rope,
        },
    )  # fmt: skip


def _fill_item(item: Any, rows: Rows, keep: list[Any]) -> None:
    item.session = _text(rows.session, keep)
    item.layer, item.position, item.k_before_rope = rows.layer, rows.position, rows.before_rope
    for place, tensor in ((item.k, rows.k), (item.v, rows.v)):
        data = _ffi.from_buffer("char[]", tensor.data)
        keep.append(data)
        place.dtype, place.rank, place.data, place.bytes = tensor.dtype, len(tensor.dims), data, len(data)
        place.dims[0 : len(tensor.dims)] = tensor.dims
        if tensor.strides:
            place.strides[0 : len(tensor.strides)] = tensor.strides
    if rows.token_ids is not None:
        ids = _ffi.from_buffer("uint32_t[]", rows.token_ids)
        if len(ids) < rows.k.dims[0]:
            raise ValueError(f"token_ids has {len(ids)} ids, k has {rows.k.dims[0]} tokens")
        keep.append(ids)
        item.token_ids = ids
