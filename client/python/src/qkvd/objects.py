"""Messages of opaque objects, put together and taken apart by hand: their bytes are copied once on their way out."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from qkvd import wire
from qkvd.calls import DURABILITIES, RETENTIONS, Call, milliseconds, reader
from qkvd.errors import DataLoss, Internal, InvalidArgument
from qkvd.v1 import objects_pb2

OBJECTS = "/qkv.v1.Objects/"
PIECE_BYTES = 1 << 20  # of a message
Data = bytes | bytearray | memoryview


def _find_checksum() -> Callable[[Any], int] | None:
    try:
        return importlib.import_module("xxhash").xxh3_64_intdigest  # type: ignore[no-any-return]
    except ImportError:
        return None


checksum = _find_checksum()  # XXH3-64, where the module is installed; else objects go without


def view_of(data: Any, name: str) -> memoryview:
    """Its bytes, where they lie in one piece."""
    try:
        view = memoryview(data).cast("B")
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"object {name}: {error}") from error
    if not view.nbytes:
        raise InvalidArgument(f"object {name} has no bytes")
    return view


def put_messages(
    objects: Iterable[tuple[str, Any]],
    *,
    retention: str | None = None,
    durability: str | None = None,
    ttl: float = 0,
    replace: bool = False,
) -> Iterator[bytes]:
    """A stream of PutObjectsRequests of about 1 MiB, each made as it is asked for."""
    if durability not in DURABILITIES:
        raise InvalidArgument(f'durability is {durability!r}, allowed are "memory", "async" and "sync"')
    if retention not in RETENTIONS:
        raise InvalidArgument(f'retention is {retention!r}, allowed are "keep" and "evict"')
    options: dict[str, Any] = {
        "retention": RETENTIONS[retention], "durability": DURABILITIES[durability],
        "ttl_ms": milliseconds(ttl),
    }  # fmt: skip
    return _put_messages(objects, options, replace)


def first_name(objects: Iterable[tuple[str, Any]]) -> tuple[str | None, Iterable[tuple[str, Any]]]:
    """The first one's, and all of them."""
    rest = iter(objects)
    for first in rest:
        return first[0], itertools.chain([first], rest)
    return None, ()


def _put_messages(objects: Iterable[tuple[str, Any]], options: dict[str, Any], replace: bool) -> Iterator[bytes]:
    parts: list[Any] = []
    used = 0
    for name, data in objects:
        view = view_of(data, name)
        known = checksum(view) if checksum is not None else 0
        begin = objects_pb2.ObjectInfo(object=name, bytes=view.nbytes, checksum=known, **options)
        head = objects_pb2.PutPiece(begin=begin, replace=replace).SerializeToString()
        for at in _cuts(view.nbytes, PIECE_BYTES - used):
            piece = view[at[0] : at[1]]
            before = head + wire.opening(15, piece.nbytes)
            parts += (wire.opening(1, len(before) + piece.nbytes) + before, piece)
            used += piece.nbytes + len(before)
            head = b""
            if used >= PIECE_BYTES:
                yield wire.message(parts)
                parts, used = [], 0
    if parts:
        yield wire.message(parts)


def _cuts(size: int, first: int) -> Iterator[tuple[int, int]]:
    """From and to of pieces: the first one fills a message up, where it has place for something worthwhile."""
    at, most = 0, first if first > PIECE_BYTES // 16 else PIECE_BYTES
    while at < size:
        yield at, min(at + most, size)
        at, most = at + most, PIECE_BYTES


def key_of(names: Sequence[str]) -> str | None:
    """By which their daemon is found."""
    return names[0] if names else None


def get_request(names: Sequence[str]) -> bytes:
    return objects_pb2.GetObjectsRequest(objects=names).SerializeToString()


def check_outs(names: Sequence[str], out: Sequence[Any] | None) -> None:
    """There is one for each."""
    if out is not None and len(out) != len(names):
        raise InvalidArgument(f"out has {len(out)} entries, there are {len(names)} names")


def _place_of(out: Any, name: str) -> memoryview:
    """Memory of the caller's, where it lies in one piece and can be written to."""
    try:
        view = memoryview(out).cast("B")
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"out of object {name}: {error}") from error
    if view.readonly:
        raise InvalidArgument(f"out of object {name} cannot be written to")
    return view


class Gathering:
    """Objects that arrive in pieces: into `out`, where the caller gives memory, else into memory of their own."""

    def __init__(self, names: Sequence[str], out: Sequence[Any] | None = None):
        check_outs(names, out)
        self._names = names
        self._targets = None if out is None else [_place_of(one, name) for one, name in zip(out, names, strict=True)]
        self._found: list[memoryview | None] = [None] * len(names)
        self._index = -1
        self._at = 0
        self._info = objects_pb2.ObjectInfo()

    def take(self, data: bytes) -> None:
        """A GetObjectsResponse."""
        view = memoryview(data)
        for piece in wire.fields(data, 0, len(data)):
            if piece.number != 1:
                continue
            index, missing, begin, body = 0, 0, None, None
            for field in wire.fields(data, piece.begin, piece.end):
                if field.number == 1:
                    index = field.value
                elif field.number == 2:
                    begin = field
                elif field.number == 3:
                    missing = field.value
                elif field.number == 15:
                    body = field
            if index >= len(self._names):
                raise Internal(f"the daemon's answer cannot be read: object {index} of {len(self._names)}")
            if missing:
                if index != self._index:  # what has come of this one is void
                    self._check_whole()
                self._found[index], self._index = None, -1
                continue
            if begin is not None:
                self._begin(index, reader(objects_pb2.ObjectInfo)(data[begin.begin : begin.end]))
            if body is not None:
                self._append(index, view[body.begin : body.end])

    def all(self) -> list[memoryview | None]:
        """When the stream has ended: the objects, None where there is none. Internal: the last one did not come whole."""
        self._check_whole()
        return self._found

    def _check_whole(self) -> None:
        target = self._found[self._index] if self._index >= 0 else None
        if target is not None and self._at < target.nbytes:
            raise Internal(f"of object {self._info.object} {self._at} of {target.nbytes} bytes have come")

    def _begin(self, index: int, info: objects_pb2.ObjectInfo) -> None:
        self._check_whole()
        self._index, self._at, self._info = index, 0, info
        if self._targets is None:
            self._found[index] = memoryview(bytearray(info.bytes))
            return
        target = self._targets[index]
        if target.nbytes < info.bytes:
            raise InvalidArgument(f"object {info.object} has {info.bytes} bytes, its place in out {target.nbytes}")
        self._found[index] = target[: info.bytes]

    def _append(self, index: int, data: memoryview) -> None:
        target = self._found[index]
        if index != self._index or target is None or self._at + data.nbytes > target.nbytes:
            raise Internal(f"the daemon's answer cannot be read: bytes of object {index} that does not expect them")
        target[self._at : self._at + data.nbytes] = data
        self._at += data.nbytes
        if self._at < target.nbytes or checksum is None or self._info.checksum == 0:
            return
        if checksum(target) != self._info.checksum:
            raise DataLoss(f"object {self._info.object} does not have its checksum")


def has_objects(names: Sequence[str], touch: bool) -> Call[list[int]]:
    request = objects_pb2.HasObjectsRequest(objects=names, touch=touch)
    parse = reader(objects_pb2.HasObjectsResponse)
    return Call(
        OBJECTS + "HasObjects", request.SerializeToString(), lambda data: list(parse(data).bytes), True, key_of(names)
    )


def delete_objects(names: Sequence[str]) -> Call[list[bool]]:
    request = objects_pb2.DeleteObjectsRequest(objects=names)
    parse = reader(objects_pb2.DeleteObjectsResponse)
    return Call(
        OBJECTS + "DeleteObjects", request.SerializeToString(), lambda data: list(parse(data).deleted), False, key_of(names)
    )


def list_objects(prefix: str, page_token: str) -> Call[objects_pb2.ListObjectsResponse]:
    request = objects_pb2.ListObjectsRequest(prefix=prefix, page_token=page_token)
    parse = reader(objects_pb2.ListObjectsResponse)
    return Call(OBJECTS + "ListObjects", request.SerializeToString(), parse, True)
