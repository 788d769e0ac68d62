"""Messages that carry rows, put together and taken apart by hand.

A generated class copies rows three times on their way out: into `bytes`, into the message, into the message's own bytes.
Here the rows are joined with what stands around them from where they lie, once. Answers are read in place: the arrays are
views of what gRPC has received. The small fields are left to the generated classes: in protobuf a message is its parts, one
after the other. And so are small items and answers as a whole, those of decode steps: of 20 KiB by hand each takes twice
the time.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from qkvd import errors
from qkvd.arrays import NUMPY_OF, Array, WireTensor
from qkvd.v1 import kv_cache_pb2, tensor_pb2

Part = bytes | Array
SMALL_BYTES = 64 << 10
_IDS_AT_ONCE = 8 << 10
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def varint(number: int) -> bytes:
    """A whole number, 7 bits a byte."""
    if number < 128:
        return bytes((number,))
    out = bytearray()
    while number >= 128:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def opening(field: int, length: int) -> bytes:
    """What stands before a field of so many bytes."""
    return varint(field << 3 | _BYTES) + varint(length)


# ---- out ----


def _tensor(field: int, tensor: WireTensor) -> tuple[bytes, Array, int]:
    """What stands before the rows, the rows, and the bytes of both."""
    head = tensor_pb2.Tensor(dtype=tensor.dtype, dims=tensor.dims, strides=tensor.strides).SerializeToString()
    head += opening(15, tensor.data.nbytes)
    head = opening(field, len(head) + tensor.data.nbytes) + head
    return head, tensor.data, len(head) + tensor.data.nbytes


def item(small: kv_cache_pb2.Item, tensors: Iterable[tuple[int, str, WireTensor]]) -> list[Part]:
    """The parts of one `items` entry of a request; `tensors` with their fields' numbers and names."""
    parts: list[Part] = [b"", b""]
    length = 0
    for field, name, tensor in tensors:
        if tensor.data.nbytes <= SMALL_BYTES:
            message: tensor_pb2.Tensor = getattr(small, name)
            message.dtype, message.data = tensor.dtype, tensor.data.tobytes()
            message.dims.extend(tensor.dims)
            message.strides.extend(tensor.strides)
            if tensor.place is not None:
                message.shared_memory_region = tensor.place.region
                message.shared_memory_offset = tensor.place.offset
                message.shared_memory_byte_size = tensor.place.reach
        else:
            head, data, size = _tensor(field, tensor)
            parts += (head, data)
            length += size
    parts[1] = small.SerializeToString()
    parts[0] = opening(1, length + len(parts[1]))
    return parts


def message(parts: Iterable[Part]) -> bytes:
    """The one copy."""
    return b"".join(parts)  # type: ignore[arg-type]  # an array is a buffer


def checked_ids(ids: Sequence[int] | Array) -> array[int]:
    """Token ids as uint32, or InvalidArgument."""
    try:
        # Of bytes an array would take four as one number.
        return array("I", list(ids) if isinstance(ids, bytes | bytearray | memoryview) else ids)
    except (OverflowError, TypeError) as error:
        raise errors.InvalidArgument(f"token ids are whole numbers from 0 to {2**32 - 1}: {error}") from error


def token_ids(field: int, ids: Sequence[int] | Array, before: bytes = b"") -> bytes:
    """A field of packed uint32 behind `before`. Prompts are long: ids are packed many at once, in what the cache holds."""
    parts: list[Any] = [before, b""]
    for at in range(0, len(ids), _IDS_AT_ONCE):
        parts.append(_packed(ids[at : at + _IDS_AT_ONCE]))
    if len(parts) > 2:
        parts[1] = opening(field, sum(memoryview(part).nbytes for part in parts[2:]))
    return b"".join(parts)


def _packed(ids: Sequence[int] | Array) -> Part:
    """As varints: ids below 2^28 have seven bits in each of four bytes, of which three say that more follows."""
    given = isinstance(ids, np.ndarray) and ids.dtype == np.uint32
    values: Array = np.asarray(ids) if given else np.frombuffer(checked_ids(ids), np.uint32)
    if values.max() >= 1 << 28:
        return b"".join(varint(int(value)) for value in values)
    # The upper 14 of 28 bits move up by two; then in each half the upper seven of 14 by one.
    out: Array = values & 0x0FFFC000
    out *= 3
    out += values
    out += out & 0x3F803F80
    out |= 0x808080
    return out.astype("<u4", copy=False)


# ---- in ----


class Field(NamedTuple):
    number: int
    value: int  # of a varint
    begin: int  # of bytes, in the message
    end: int


def fields(data: bytes, begin: int, end: int) -> Iterator[Field]:
    """The fields of the message that lies at [begin, end) of `data`, in its order; fixed ones are passed over."""
    at = begin
    while at < end:
        tag, at = _read_varint(data, at, end)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _read_varint(data, at, end)
            yield Field(number, value, at, at)
        elif kind == _BYTES:
            length, at = _read_varint(data, at, end)
            if length > end - at:
                raise _unreadable("a field is longer than its message")
            yield Field(number, 0, at, at + length)
            at += length
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise _unreadable(f"a field has wire type {kind}")
    if at != end:
        raise _unreadable("a field is cut short")


def _read_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise _unreadable("a number is cut short")


def _unreadable(why: str) -> errors.Internal:
    return errors.Internal(f"the daemon's answer cannot be read: {why}")


def tensor(data: bytes, begin: int, end: int) -> Array:
    """A view of a dense tensor of an answer: not writable, of no particular alignment."""
    dtype, at, length = 0, begin, 0
    dims: list[int] = []
    for field in fields(data, begin, end):
        if field.number == 1:
            dtype = field.value
        elif field.number == 2 and field.begin == field.end:
            dims.append(field.value)
        elif field.number == 2:
            position = field.begin
            while position < field.end:
                value, position = _read_varint(data, position, field.end)
                dims.append(value)
        elif field.number == 3:
            raise _unreadable("a tensor has strides")
        elif field.number == 15:
            at, length = field.begin, field.end - field.begin
    element = NUMPY_OF.get(dtype)
    if element is None:
        raise _unreadable(f"a tensor is of dtype {dtype}")
    count = 1
    for dim in dims:
        count *= dim
    if count * element.itemsize != length:
        raise _unreadable(f"a tensor of {element} {dims} has {length} bytes")
    return np.frombuffer(data, element, count, at).reshape(dims)


class AttendResult(NamedTuple):
    """Of one item, as it came: views of the answer."""

    code: int
    text: str
    length: int
    out: Array | None
    lse: Array | None


def attend_results(data: bytes) -> list[AttendResult]:
    """The results of an AttendResponse."""
    if len(data) <= SMALL_BYTES:
        return _small_results(data)
    return [_attend_result(data, at.begin, at.end) for at in fields(data, 0, len(data)) if at.number == 1]


def _small_results(data: bytes) -> list[AttendResult]:
    try:
        results = kv_cache_pb2.AttendResponse.FromString(data).results
    except Exception as error:  # DecodeError, whose module is one of protobuf's implementation
        raise _unreadable(str(error)) from error
    return [
        AttendResult(
            result.status.code,
            result.status.message,
            result.length,
            _small_tensor(result.out) if result.HasField("out") else None,
            _small_tensor(result.lse) if result.HasField("lse") else None,
        )
        for result in results
    ]


def _small_tensor(message: tensor_pb2.Tensor) -> Array:
    element = NUMPY_OF.get(message.dtype)
    if element is None:
        raise _unreadable(f"a tensor is of dtype {message.dtype}")
    try:
        return np.frombuffer(message.data, element).reshape(message.dims[:])
    except ValueError as error:
        raise _unreadable(f"a tensor of {element} {message.dims} has {len(message.data)} bytes") from error


def _status(data: bytes, begin: int, end: int) -> tuple[int, str]:
    code, text = 0, ""
    for field in fields(data, begin, end):
        if field.number == 1:
            code = field.value
        elif field.number == 2:
            text = data[field.begin : field.end].decode(errors="replace")
    return code, text


def _attend_result(data: bytes, begin: int, end: int) -> AttendResult:
    code, text, length = 0, "", 0
    out = lse = None
    for field in fields(data, begin, end):
        if field.number == 1:
            code, text = _status(data, field.begin, field.end)
        elif field.number == 2:
            length = field.value
        elif field.number == 3:
            out = tensor(data, field.begin, field.end)
        elif field.number == 4:
            lse = tensor(data, field.begin, field.end)
    return AttendResult(code, text, length, out, lse)


class Rows(NamedTuple):
    """A run of rows of one layer. `k` and `v` are views of what was received: not writable; None where not asked for."""

    layer: int
    position: int  # of the first token
    k: Array | None
    v: Array | None


def rows(data: bytes) -> Rows:
    """A FetchResponse."""
    layer = position = 0
    k = v = None
    for field in fields(data, 0, len(data)):
        if field.number == 1:
            layer = field.value
        elif field.number == 2:
            position = field.value
        elif field.number == 3:
            k = tensor(data, field.begin, field.end)
        elif field.number == 4:
            v = tensor(data, field.begin, field.end)
    return Rows(layer, position, k, v)
