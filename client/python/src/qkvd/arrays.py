"""Arrays of callers, as bytes of the wire and back, without a copy where none is needed.

Taken are numpy arrays of float32, float16 and float64 (sent as fp32), bf16 as uint16 (its bits) or as the bfloat16 of
ml_dtypes; tensors of torch in the processor's memory; and whatever else has `__dlpack__`. What comes back is numpy, bf16 as
uint16: `bf16_to_fp32` widens it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkvd.errors import InvalidArgument
from qkvd.v1 import tensor_pb2

Array = NDArray[Any]
DTYPES = {"fp32": tensor_pb2.DTYPE_FP32, "fp16": tensor_pb2.DTYPE_FP16, "bf16": tensor_pb2.DTYPE_BF16}
NUMPY_OF: dict[int, np.dtype[Any]] = {
    tensor_pb2.DTYPE_FP32: np.dtype("<f4"),
    tensor_pb2.DTYPE_FP16: np.dtype("<f2"),
    tensor_pb2.DTYPE_BF16: np.dtype("<u2"),
}
_WIRE_OF = {NUMPY_OF[number]: number for number in DTYPES.values()}
# What is converted on its way, from either order of bytes.
_CONVERTED = {np.dtype("f8"): "<f4", np.dtype("f4"): "<f4", np.dtype("f2"): "<f2", np.dtype("u2"): "<u2"}


class WireTensor(NamedTuple):
    """A tensor as the wire describes it, over the caller's memory."""

    dtype: tensor_pb2.DType
    dims: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes; () where dense
    data: Array  # C-contiguous; empty where the rows lie in a region
    place: Placed | None = None


_NOTHING: Array = np.empty(0, np.uint8)


@dataclass(frozen=True)
class Placed:
    """A tensor in a region that is registered with the daemon (`qkvd.memory`), in the place of an array."""

    region: str
    offset: int  # of its first element in the region, in bytes
    shape: tuple[int, ...]
    dtype: str  # "fp32", "fp16" or "bf16"
    strides: tuple[int, ...]  # in bytes

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, which: slice) -> Placed:
        begin, end, step = which.indices(self.shape[0])
        if step != 1:
            raise InvalidArgument(f"a tensor in a region is cut with a step of {step}, allowed is 1")
        count = max(end - begin, 0)
        return replace(self, offset=self.offset + begin * self.strides[0], shape=(count, *self.shape[1:]))

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return NUMPY_OF[dtype_number(self.dtype)].itemsize

    @property
    def reach(self) -> int:
        """Bytes from the first element to behind the last."""
        if 0 in self.shape:
            return 0
        return sum((count - 1) * stride for count, stride in zip(self.shape, self.strides, strict=True)) + self.itemsize


def dtype_number(name: str | None) -> tensor_pb2.DType:
    """The number of "fp32", "fp16" or "bf16"; of None that of "unspecified"."""
    if name is None:
        return tensor_pb2.DTYPE_UNSPECIFIED
    if name not in DTYPES:
        raise InvalidArgument(f'dtype is {name!r}, allowed are "fp32", "fp16" and "bf16"')
    return DTYPES[name]


def as_numpy(array: Any, what: str) -> Array:
    """A numpy array over the same memory; bf16 as uint16. A tensor of torch gives an array that can be written to."""
    if isinstance(array, np.ndarray):
        return array.view(np.uint16) if array.dtype.kind == "V" and array.dtype.name == "bfloat16" else array
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        if array.device.type != "cpu":
            raise InvalidArgument(f"{what} is on {array.device}; qkvd takes tensors of the processor: call .cpu()")
        array = array.detach()
        if array.dtype == torch.bfloat16:
            return np.asarray(array.view(torch.int16).numpy()).view(np.uint16)
        return np.asarray(array.numpy())
    if not hasattr(array, "__dlpack__"):
        raise InvalidArgument(f"{what} is a {type(array).__name__}; allowed are numpy arrays and what has __dlpack__")
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{what} cannot be read by way of __dlpack__: {error}") from error


def to_wire(array: Any, what: str) -> WireTensor:
    """Describes the array as it lies where its elements fill their memory, in whatever order; packs it elsewhere."""
    if isinstance(array, Placed):
        return WireTensor(dtype_number(array.dtype), array.shape, array.strides, _NOTHING, array)
    values = as_numpy(array, what)
    number = _WIRE_OF.get(values.dtype)
    if number is None and values.dtype.newbyteorder("=") in _CONVERTED:
        values = values.astype(_CONVERTED[values.dtype.newbyteorder("=")])
        number = _WIRE_OF[values.dtype]
    if number is None:
        raise InvalidArgument(
            f"{what} is of {values.dtype}; allowed are float32, float16, float64 and bf16, as uint16 or bfloat16"
        )
    if values.flags.c_contiguous:
        return WireTensor(number, values.shape, (), values)
    # A row must be contiguous, whatever the order of the other dimensions.
    order = sorted(range(values.ndim), key=lambda axis: -values.strides[axis])
    turned = values.transpose(order)
    if order[-1] == values.ndim - 1 and turned.flags.c_contiguous:
        return WireTensor(number, values.shape, values.strides, turned)
    return WireTensor(number, values.shape, (), np.ascontiguousarray(values))


def destination(array: Any, what: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """The caller's array that an answer is to be written to: of this shape and type, and writable."""
    values = as_numpy(array, what)
    if values.shape != shape or values.dtype != dtype:
        raise InvalidArgument(f"{what} is {values.dtype} {list(values.shape)}, the answer is {dtype} {list(shape)}")
    if not values.flags.writeable:
        raise InvalidArgument(f"{what} cannot be written to")
    return values


def bf16_to_fp32(bits: Array) -> NDArray[np.float32]:
    """Widens bf16, as uint16, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp32_to_bf16(values: Array) -> NDArray[np.uint16]:
    """Rounds finite fp32 to bf16, to nearest even, as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
