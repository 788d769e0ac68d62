"""Memory that a daemon on this machine reads and writes itself, so that rows do not cross the socket.

    with qkvd.Client("unix:/run/qkvd.sock") as client:
        token = memory.pass_descriptors("/run/qkvd/shm.sock", [memfd])  # sealed: F_SEAL_SHRINK
        region = memory.register(client, "rows", size, descriptor=token)
        k, v = region.tensor(0, k_shape, "fp16"), region.tensor(at, v_shape, "fp16")
        client.append([qkvd.Item(session="chat-42", k=k, v=v)])
        tokens = memory.fetch_into(client, "chat-42", 0, k=region.part(0, k_bytes), v=region.part(at, v_bytes))

Memory on the daemon's GPU is registered by `register_cuda`. The daemon runs with --allow-client-shm, and the client's
target is a unix socket (docs/shared-memory.md says who may do what).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from qkvd import calls
from qkvd.arrays import NUMPY_OF, Placed, dtype_number
from qkvd.client import Client
from qkvd.errors import Internal, InvalidArgument, Unavailable, of_number
from qkvd.v1 import kv_cache_pb2, shared_memory_pb2, tensor_pb2

__all__ = ["Placed", "Region", "fetch_into", "pass_descriptors", "register", "register_cuda", "unregister"]

SERVICE = "/qkv.v1.SharedMemory/"
GREETING = b"qkvdfd\x01\x00"
TOKEN_DIGITS = 32


@dataclass(frozen=True)
class Region:
    """What the daemon has opened; it stays open until `unregister`, or until the daemon ends."""

    name: str
    size: int
    on_gpu: bool

    def tensor(self, offset: int, shape: Sequence[int], dtype: str, strides: Sequence[int] = ()) -> Placed:
        """A tensor there, for an item's k, v or q; dense unless it has strides, in bytes."""
        size = NUMPY_OF[dtype_number(dtype)].itemsize
        dense = [size] * len(shape)
        for axis in range(len(shape) - 2, -1, -1):
            dense[axis] = dense[axis + 1] * shape[axis + 1]
        placed = Placed(self.name, offset, tuple(shape), dtype, tuple(strides) or tuple(dense))
        if len(placed.strides) != len(placed.shape):
            raise InvalidArgument(f"strides has {len(placed.strides)} entries, shape has {len(placed.shape)}")
        if offset < 0 or offset + placed.reach > self.size:
            raise InvalidArgument(f"a tensor at {offset} reaches {placed.reach} bytes, {self.name} has {self.size}")
        return placed

    def part(self, offset: int, size: int) -> tensor_pb2.RegionPart:
        """Bytes there, for what is fetched."""
        return tensor_pb2.RegionPart(
            shared_memory_region=self.name, shared_memory_offset=offset, shared_memory_byte_size=size
        )


def pass_descriptors(path: str, descriptors: Sequence[int], *, timeout: float = 10) -> str:
    """Passes 1 to 64 descriptors by the daemon's --shm-listen. What is returned stands for them in one `register`.

    ResourceExhausted: too many wait. Unavailable: nobody answers at `path`.
    """
    answer = b""
    try:
        with socket.socket(socket.AF_UNIX) as passing:
            passing.settimeout(timeout)
            passing.connect(path)
            socket.send_fds(passing, [GREETING], list(descriptors))
            while part := passing.recv(4096):
                answer += part
    except OSError as error:
        raise Unavailable(f"{path}: {error}") from error
    if not answer:
        raise Unavailable(f"{path}: no answer")
    text = answer[1:].decode(errors="replace")
    if answer[0]:
        raise of_number(answer[0], text)
    if len(text) != TOKEN_DIGITS:
        raise Internal(f"{path}: no token")
    return text


def register(client: Client, name: str, size: int, *, key: str = "", descriptor: str = "", offset: int = 0) -> Region:
    """System memory: an object of shm_open by its key, or a memfd by what `pass_descriptors` has returned."""
    region = shared_memory_pb2.SystemSharedMemoryRegion(name=name, key=key, offset=offset, byte_size=size)
    request = shared_memory_pb2.SystemSharedMemoryRegisterRequest(region=region, descriptor=descriptor)
    answer = shared_memory_pb2.SystemSharedMemoryRegisterResponse
    client.call(SERVICE + "SystemSharedMemoryRegister", request, answer)
    return Region(name, size, on_gpu=False)


def register_cuda(
    client: Client,
    name: str,
    size: int,
    *,
    handle: bytes = b"",
    descriptor: str = "",
    descriptor_bytes: int = 0,
    offset: int = 0,
    device: int = 0,
) -> Region:
    """Memory on the daemon's GPU: by a cudaIpcMemHandle_t, or by exported allocations of `descriptor_bytes` each."""
    region = shared_memory_pb2.CudaSharedMemoryRegion(name=name, device_id=device, byte_size=size)
    request = shared_memory_pb2.CudaSharedMemoryRegisterRequest(
        region=region, raw_handle=handle, offset=offset, descriptor=descriptor, descriptor_bytes=descriptor_bytes
    )
    answer = shared_memory_pb2.CudaSharedMemoryRegisterResponse
    client.call(SERVICE + "CudaSharedMemoryRegister", request, answer)
    return Region(name, size, on_gpu=True)


def unregister(client: Client, region: Region) -> None:
    """Calls that use it meanwhile end as they would have."""
    if region.on_gpu:
        cuda = shared_memory_pb2.CudaSharedMemoryUnregisterRequest(name=region.name)
        client.call(SERVICE + "CudaSharedMemoryUnregister", cuda, shared_memory_pb2.CudaSharedMemoryUnregisterResponse)
    else:
        system = shared_memory_pb2.SystemSharedMemoryUnregisterRequest(name=region.name)
        answer = shared_memory_pb2.SystemSharedMemoryUnregisterResponse
        client.call(SERVICE + "SystemSharedMemoryUnregister", system, answer)


def fetch_into(
    client: Client,
    session: str,
    layer: int,
    *,
    k: tensor_pb2.RegionPart | None = None,
    v: tensor_pb2.RegionPart | None = None,
    begin: int = 0,
    end: int = 0,
    dtype: str | None = None,
    timeout: float | None = None,
) -> int:
    """The rows of a layer, decoded into regions, one behind the other; how many tokens they are."""
    if k is None and v is None:
        raise InvalidArgument("k and v are None")
    part = "both" if k is not None and v is not None else "k" if k is not None else "v"
    asked = calls.fetch_request(session, [layer], begin, end, dtype, False, part, "after", 0)
    into = kv_cache_pb2.FetchRequest(k_into=k, v_into=v).SerializeToString()  # a message is its parts
    tokens, read = 0, calls.reader(kv_cache_pb2.FetchResponse)
    for data in client._stream(calls.CACHE + "Fetch", asked + into, timeout, session):
        piece = read(data)
        tokens += next(iter((piece.k if piece.HasField("k") else piece.v).dims), 0)
    return tokens
