"""Rows that lie in a client's memory on the GPU: the fake CUDA driver takes an object of shared memory for such memory, so
that this process can see what the daemon reads and writes there."""

import os
import threading

import grpc
import numpy as np
import pytest

from daemon import Daemon, wait_for
from kv import FP16, FP32, TIMEOUT, Cache, encode, refused, tensor
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import shared_memory_pb2 as shm
from qkv.v1 import shared_memory_pb2_grpc, tensor_pb2
from test_gpu import kernels, kernels_in, with_gpu  # noqa: F401
from test_shared_memory import make_cache  # noqa: F401
from test_shared_memory import MIB, Object, append, append_item, append_while_regions_go, lying, register, regions, unregister

CODE = grpc.StatusCode


def handle_of(there):
    return (b"ekaf" + there.key.encode()).ljust(64, b"\0")


def register_cuda(stub, name, handle, size, offset=0, device_id=0, metadata=()):
    region = shm.CudaSharedMemoryRegion(name=name, device_id=device_id, byte_size=size)
    stub.CudaSharedMemoryRegister(shm.CudaSharedMemoryRegisterRequest(region=region, raw_handle=handle, offset=offset),
                                  timeout=TIMEOUT, metadata=metadata)


def cuda_regions(stub, name="", metadata=()):
    answer = stub.CudaSharedMemoryStatus(shm.CudaSharedMemoryStatusRequest(name=name), timeout=TIMEOUT,
                                         metadata=metadata)
    return [(region.name, region.device_id, region.byte_size) for region in answer.regions]


def unregister_cuda(stub, name="", metadata=()):
    stub.CudaSharedMemoryUnregister(shm.CudaSharedMemoryUnregisterRequest(name=name), timeout=TIMEOUT,
                                    metadata=metadata)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with with_gpu(kernels_in(tmp_path_factory.mktemp("cuda")), "--allow-client-shm") as daemon:
        yield daemon


@pytest.fixture
def memory(server):
    """Names of this test's own, of both kinds, are given back however it ends."""
    stub = shared_memory_pb2_grpc.SharedMemoryStub(server.channel())
    yield stub
    unregister_cuda(stub)
    unregister(stub)
    server.disconnect()


def test_regions_are_listed_and_removed(server, memory):
    with Object(3 * MIB) as a, Object(4096) as b:
        register_cuda(memory, "a", handle_of(a), MIB)
        register_cuda(memory, "rest", handle_of(a), 2 * MIB - 3, MIB + 3)
        register(memory, "system", b.key, 0, 4096)
        assert cuda_regions(memory) == [("a", 0, MIB), ("rest", 0, 2 * MIB - 3)]
        assert cuda_regions(memory, "rest") == [("rest", 0, 2 * MIB - 3)]
        assert regions(memory) == [("system", b.key, 0, 4096)]
        assert server.metric("qkvd_client_shm_regions") == 3 and server.metric("qkvd_client_shm_cuda_regions") == 2
        register_cuda(memory, "a", handle_of(a), MIB)  # the same once more
        for handle, size, offset in ((handle_of(a), MIB, 1), (handle_of(a), MIB - 1, 0), (handle_of(b), 4096, 0)):
            with refused(CODE.ALREADY_EXISTS, "region.name a"):
                register_cuda(memory, "a", handle, size, offset)
        with refused(CODE.ALREADY_EXISTS, "region.name system", b.key):
            register_cuda(memory, "system", handle_of(b), 4096)
        with refused(CODE.ALREADY_EXISTS, "region.name a", "on the GPU"):
            register(memory, "a", b.key, 0, 4096)
        for call in (unregister_cuda, cuda_regions):  # each kind has its own calls
            with refused(CODE.NOT_FOUND, "system is not registered"):
                call(memory, "system")
        for call in (unregister, regions):
            with refused(CODE.NOT_FOUND, "rest is not registered"):
                call(memory, "rest")
        unregister_cuda(memory)
        assert cuda_regions(memory) == [] and len(regions(memory)) == 1
        assert server.metric("qkvd_client_shm_cuda_regions") == 0


def test_what_is_refused(server, memory):
    with Object(8192) as there:
        good = handle_of(there)
        for name, handle, size, offset, device, code, *texts in (
            ("", good, 1, 0, 0, CODE.INVALID_ARGUMENT, "region.name"),
            ("r", b"", 1, 0, 0, CODE.INVALID_ARGUMENT, "raw_handle has 0 bytes", "64"),
            ("r", good[:63], 1, 0, 0, CODE.INVALID_ARGUMENT, "raw_handle has 63 bytes", "64"),
            ("r", good + b"\0", 1, 0, 0, CODE.INVALID_ARGUMENT, "raw_handle has 65 bytes", "64"),
            ("r", bytes(64), 1, 0, 0, CODE.INVALID_ARGUMENT, "raw_handle cannot be opened", "cuIpcOpenMemHandle", "(1)"),
            ("r", b"\xff" * 64, 1, 0, 0, CODE.INVALID_ARGUMENT, "raw_handle cannot be opened"),
            ("r", good, 0, 0, 0, CODE.INVALID_ARGUMENT, "region.byte_size is 0"),
            ("r", good, 8193, 0, 0, CODE.INVALID_ARGUMENT, "region.byte_size 8193", "raw_handle has 8192 bytes"),
            ("r", good, 1, 8192, 0, CODE.INVALID_ARGUMENT, "offset is 8192"),
            ("r", good, 2**64 - 1, 1, 0, CODE.INVALID_ARGUMENT, "region.byte_size"),
            ("r", good, 2, 2**64 - 1, 0, CODE.INVALID_ARGUMENT, "offset"),
            ("r", good, 1, 0, 1, CODE.INVALID_ARGUMENT, "region.device_id is 1", "GPU 0"),
            ("r", good, 1, 0, -1, CODE.INVALID_ARGUMENT, "region.device_id is -1"),
        ):
            with refused(code, *texts):
                register_cuda(memory, name, handle, size, offset, device)
        with refused(CODE.INVALID_ARGUMENT, "region is missing"):
            memory.CudaSharedMemoryRegister(shm.CudaSharedMemoryRegisterRequest(raw_handle=good), timeout=TIMEOUT)
        stub = shared_memory_pb2_grpc.SharedMemoryStub(server.channel(server.tcp))
        with refused(CODE.PERMISSION_DENIED, "unix socket"):
            register_cuda(stub, "r", good, 1)
        assert cuda_regions(memory) == []
        assert server.metric("qkvd_gpu_down") == 0  # nothing of this takes the GPU out of use


def test_without_a_gpu_and_without_the_option(kernels):  # noqa: F811
    with Object(4096) as there:
        with Daemon("--allow-client-shm") as daemon:
            stub = shared_memory_pb2_grpc.SharedMemoryStub(daemon.channel())
            with refused(CODE.FAILED_PRECONDITION, "region.device_id", "no GPU", "--gpu-memory"):
                register_cuda(stub, "r", handle_of(there), 1)
            assert cuda_regions(stub) == []
        with with_gpu(kernels) as daemon:
            stub = shared_memory_pb2_grpc.SharedMemoryStub(daemon.channel())
            for call in (lambda: register_cuda(stub, "r", handle_of(there), 1), lambda: cuda_regions(stub),
                         lambda: unregister_cuda(stub)):
                with refused(CODE.UNIMPLEMENTED, "--allow-client-shm"):
                    call()


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("tokens", [3, 3000])
def test_rows_from_and_to_the_gpu(server, memory, make_cache, dtype, tokens):
    here, there = (make_cache(dtype=dtype, recent_window=10000) for _ in range(2))
    k, v = here.rows(tokens)
    with Object(4 * MIB) as at:
        register_cuda(memory, "r", handle_of(at), 4 * MIB - 100, 100)
        size = at.place(100 + 7, encode(k, dtype))
        at.place(100 + MIB, encode(v, dtype))
        item = append_item(here, 0, k=lying("r", 7, k, dtype), v=lying("r", MIB, v, dtype))
        assert append(here, item).tokens == tokens
        there.append(0, k, v, dtype=dtype)
        for a, b in zip(here.fetch(), there.fetch()):
            assert np.array_equal(a, b)
        into = [tensor_pb2.RegionPart(shared_memory_region="r", shared_memory_offset=offset,
                                      shared_memory_byte_size=size) for offset in (2 * MIB, 3 * MIB)]
        request = kv.FetchRequest(session=here.name, layers=[0], dtype=dtype, k_into=into[0], v_into=into[1],
                                  chunk_tokens=100)
        position = 0
        for piece in here.stub.Fetch(request, timeout=TIMEOUT):
            assert piece.position == position and piece.k.data == b"" and piece.v.shared_memory_region == "r"
            position += piece.k.dims[0]
        assert position == tokens
        kind = {FP32: "<f4", FP16: "<f2"}[dtype]
        for offset, array in ((2 * MIB, k), (3 * MIB, v)):
            assert np.array_equal(at.read(100 + offset, kind, array.shape), encode(array, dtype))
            assert bytes(at.memory.buf[100 + offset + size:100 + offset + size + 64]) == b"\x5a" * 64


@pytest.mark.parametrize("layout", [0, kv.ROW_LAYOUT_HEADS_FIRST])
@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_coded_rows_are_made_on_the_gpu(server, memory, make_cache, dtype, layout):
    """The same bits as by the socket: of pages, and of the exact rows behind them, in chunks of any size."""
    kind = {FP32: "<f4", FP16: "<f2"}[dtype]
    cache = make_cache(recent_window=10, key_dim=64, value_dim=128)
    cache.append(0, *cache.rows(500))
    with Object(8 * MIB) as there, Object(8 * MIB) as host:
        register_cuda(memory, "r", handle_of(there), 8 * MIB)
        register(memory, "host", host.key, 0, 8 * MIB)
        made = server.metric("qkvd_gpu_fetch_tokens_total")
        for chunk, begin, end, k_at, v_at, k_region, v_region in (
            (0, 0, 0, 0, 4 * MIB, "r", "r"), (100, 3, 0, 4, 4 * MIB + 12, "r", "r"), (64, 100, 333, 256, 4 * MIB, "r", "r"),
            (0, 0, 490, 0, 0, "r", "host"), (0, 0, 0, 0, 0, "host", "r"), (0, 0, 0, 1, 4 * MIB, "r", "r"),
        ):
            there.memory.buf[:] = b"\x5a" * there.size
            request = kv.FetchRequest(
                session=cache.name, layers=[0], dtype=dtype, layout=layout, chunk_tokens=chunk,
                range=tensor_pb2.TokenRange(begin=begin, end=end),
                k_into=tensor_pb2.RegionPart(shared_memory_region=k_region, shared_memory_offset=k_at,
                                             shared_memory_byte_size=MIB * 4 - 16),
                v_into=tensor_pb2.RegionPart(shared_memory_region=v_region, shared_memory_offset=v_at,
                                             shared_memory_byte_size=MIB * 4 - 16))
            plain = kv.FetchRequest()
            plain.CopyFrom(request)
            plain.ClearField("k_into")
            plain.ClearField("v_into")
            pieces = list(cache.stub.Fetch(request, timeout=TIMEOUT))
            expected = list(cache.stub.Fetch(plain, timeout=TIMEOUT))
            assert sum(piece.k.dims[1 if layout else 0] for piece in pieces) == (end or 500) - begin
            for part, region in (("k", k_region), ("v", v_region)):
                source = there if region == "r" else host
                tensors = [getattr(piece, part) for piece in pieces]
                for one in tensors:
                    assert one.data == b"" and one.shared_memory_region == region
                came = [source.read(one.shared_memory_offset, kind, tuple(one.dims)) for one in tensors]
                axis = 1 if layout else 0
                whole = [np.frombuffer(getattr(piece, part).data, kind).reshape(getattr(piece, part).dims)
                         for piece in expected]
                assert np.array_equal(np.concatenate(came, axis), np.concatenate(whole, axis))
            last = max(one.shared_memory_offset + one.shared_memory_byte_size
                       for piece in pieces for one in (piece.k, piece.v) if one.shared_memory_region == "r")
            assert bytes(there.memory.buf[last:last + 64]) == b"\x5a" * 64
        assert server.metric("qkvd_gpu_fetch_tokens_total") - made > 1500
        request.k_into.shared_memory_byte_size = 1000
        with refused(CODE.INVALID_ARGUMENT, "k_into.shared_memory_byte_size is too small"):
            list(cache.stub.Fetch(request, timeout=TIMEOUT))
        request.k_into.shared_memory_offset = 0
        with refused(CODE.INVALID_ARGUMENT, "k_into.shared_memory_byte_size is too small"):
            list(cache.stub.Fetch(request, timeout=TIMEOUT))


@pytest.mark.parametrize("layout", ["tokens", "heads"])
def test_appended_rows_are_coded_on_the_gpu(server, memory, make_cache, layout):
    """The same pages as of rows in the message: what is decoded of them has the same bits."""
    made = server.metric("qkvd_gpu_append_tokens_total")
    here, there = (make_cache(dtype=FP16, recent_window=10, key_dim=64, value_dim=128) for _ in range(2))
    with Object(4 * MIB) as at:
        register_cuda(memory, "r", handle_of(at), 4 * MIB)
        position = 0
        for tokens in (700, 1, 63, 64, 300):
            k, v = here.rows(tokens)
            k[::50] *= 30  # outliers
            tensors = {}
            for field, offset, rows in (("k", 0, k), ("v", 2 * MIB, v)):
                tensors[field] = lying("r", offset, rows, FP16)
                if layout == "heads":
                    width = rows.shape[2] * 2
                    at.place(offset, encode(rows.transpose(1, 0, 2), FP16))
                    tensors[field].strides[:] = (width, tokens * width, 2)
                else:
                    at.place(offset, encode(rows, FP16))
            assert append(here, append_item(here, position, **tensors)).tokens == tokens
            at.memory.buf[:] = b"\x7f" * at.size
            there.append(position, k, v, dtype=FP16)
            position += tokens
        for a, b in zip(here.fetch(), there.fetch()):
            assert np.array_equal(a, b)
        with refused(CODE.INVALID_ARGUMENT, "k[3, 1, 2] is nan"):
            k[3, 1, 2] = np.nan
            at.place(0, encode(k, FP16))
            at.place(2 * MIB, encode(v, FP16))
            append(here, append_item(here, position, k=lying("r", 0, k, FP16), v=lying("r", 2 * MIB, v, FP16)))
    # 10 pages of the first append, and 3 or 4 of the last: others begin with rows that are exact already.
    assert server.metric("qkvd_gpu_append_tokens_total") - made >= 13 * 64
    assert server.metric("qkvd_gpu_append_host_tokens_total") == 0


def test_two_gpus(kernels):  # noqa: F811
    """Memory of either, and keys on the one while values go to the other, wherever the session is."""
    with with_gpu(kernels, "--allow-client-shm", "--gpu-devices", "all") as daemon, Object(MIB) as a, Object(MIB) as b:
        stub = shared_memory_pb2_grpc.SharedMemoryStub(daemon.channel())
        register_cuda(stub, "a", handle_of(a), MIB, device_id=0)
        register_cuda(stub, "b", handle_of(b), MIB, device_id=1)
        assert cuda_regions(stub) == [("a", 0, MIB), ("b", 1, MIB)]
        with refused(CODE.INVALID_ARGUMENT, "region.device_id is 2"):
            register_cuda(stub, "c", handle_of(a), MIB, device_id=2)
        for name in ("first", "second"):  # of which each GPU has one
            cache = Cache(daemon.stub(), name, recent_window=10, key_dim=64, value_dim=64)
            cache.append(0, *cache.rows(300))
            request = kv.FetchRequest(session=name, layers=[0], dtype=FP16)
            (plain,) = cache.stub.Fetch(request, timeout=TIMEOUT)
            for k, v in ((("a", a), ("b", b)), (("b", b), ("a", a))):
                request.k_into.CopyFrom(tensor_pb2.RegionPart(shared_memory_region=k[0], shared_memory_byte_size=MIB))
                request.v_into.CopyFrom(tensor_pb2.RegionPart(shared_memory_region=v[0], shared_memory_byte_size=MIB))
                (piece,) = cache.stub.Fetch(request, timeout=TIMEOUT)
                for part, (_, there) in (("k", k), ("v", v)):
                    data = getattr(plain, part).data
                    assert bytes(there.memory.buf[:len(data)]) == data, (name, part, piece.k.shared_memory_region)
        assert daemon.metric("qkvd_gpu_down") == 0


@pytest.mark.parametrize("queries", [1, 64])
def test_attention_from_and_into_the_gpu(memory, make_cache, queries):
    cache = make_cache(recent_window=16)
    cache.append(0, *cache.rows(300))
    q = cache.queries(queries)
    expected = cache.attend(299, q)
    with Object(MIB) as at:
        register_cuda(memory, "r", handle_of(at), MIB)
        at.place(0, q)
        item = cache.item(299)
        item.q.CopyFrom(lying("r", 0, q))
        item.options.precision = kv.AttendOptions.PRECISION_FP32
        into = tensor_pb2.RegionPart(shared_memory_region="r", shared_memory_offset=MIB // 2,
                                     shared_memory_byte_size=MIB // 2)
        request = kv.AttendRequest(items=[item], results_into=into, id=7)
        for answer in (cache.stub.Attend(request, timeout=TIMEOUT),
                       next(cache.stub.Decode(iter([request]), timeout=TIMEOUT))):
            (result,) = answer.results
            assert result.out.data == b"" and result.out.shared_memory_region == "r"
            out = at.read(result.out.shared_memory_offset, "<f4", expected[0].shape)
            lse = at.read(result.lse.shared_memory_offset, "<f4", expected[1].shape)
            assert np.array_equal(out, expected[0]) and np.array_equal(lse, expected[1])


def test_names_are_the_tenants(memory, make_cache):
    own, other = (("qkv-tenant", "a"),), (("qkv-tenant", "b"),)
    cache = make_cache()
    k, v = cache.rows(3)
    with Object(4096) as at:
        register_cuda(memory, "r", handle_of(at), 4096, metadata=own)
        with refused(CODE.NOT_FOUND, "r is not registered"):
            cuda_regions(memory, "r", other)
        with refused(CODE.NOT_FOUND, "r is not registered"):
            unregister_cuda(memory, "r", other)
        with refused(CODE.NOT_FOUND, "k.shared_memory_region r is not registered"):
            append(cache, append_item(cache, 0, k=lying("r", 0, k), v=tensor(v)))
        unregister_cuda(memory, metadata=other)
        assert cuda_regions(memory, metadata=own) == [("r", 0, 4096)]
        unregister_cuda(memory, "r", own)


def test_rows_are_what_was_checked(memory, make_cache):
    """A client that writes while its rows are read."""
    cache = make_cache(layers=1, recent_window=100000, key_dim=64, value_dim=64)
    k, v = cache.rows(256)
    stop = threading.Event()
    with Object(2 * MIB) as at:
        register_cuda(memory, "r", handle_of(at), 2 * MIB)
        at.place(MIB, v)

        def disturb():
            nan = np.full_like(k, np.nan)
            while not stop.is_set():
                at.place(0, nan)
                at.place(0, k)

        thread = threading.Thread(target=disturb)
        thread.start()
        position, outcomes = 0, set()
        try:
            for _ in range(300):
                item = append_item(cache, position, k=lying("r", 0, k), v=lying("r", MIB, v))
                try:
                    position += append(cache, item).tokens
                    outcomes.add(CODE.OK)
                except grpc.RpcError as error:
                    outcomes.add(error.code())
        finally:
            stop.set()
            thread.join()
        assert outcomes <= {CODE.OK, CODE.INVALID_ARGUMENT}
        if position > 0:
            assert np.isfinite(cache.fetch()[0]).all()


def test_unregistering_while_requests_run(memory, make_cache):
    cache = make_cache(layers=1, recent_window=100000, key_dim=64, value_dim=64)
    with Object(2 * MIB) as at:
        def come_and_go():
            register_cuda(memory, "r", handle_of(at), 2 * MIB)
            unregister_cuda(memory, "r")
        append_while_regions_go(cache, at, come_and_go)


@pytest.mark.parametrize("fault", ["cuMemcpyDtoHAsync:2:719", "cuEventQuery:4:999"])
def test_a_gpu_that_fails(kernels, fault):  # noqa: F811
    """Calls on its regions fail and say so, all else is served; once the GPU is back, regions are registered again."""
    with with_gpu(kernels, "--allow-client-shm", FAKE_CUDA_FAIL=fault) as daemon, Object(2 * MIB) as at:
        stub = shared_memory_pb2_grpc.SharedMemoryStub(daemon.channel())
        cache = Cache(daemon.stub(), "s", recent_window=10000)
        k, v = cache.rows(16)
        cache.append(0, k, v)
        register_cuda(stub, "r", handle_of(at), 2 * MIB)
        at.place(0, k)
        item = append_item(cache, 0, k=lying("r", 0, k), v=tensor(v))
        position, failed = 16, None
        while failed is None and position < 320:
            item.position = position
            try:
                position += append(cache, item).tokens
            except grpc.RpcError as error:
                failed = error
        assert failed.code() == CODE.UNAVAILABLE and "items[0]" in failed.details(), failed.details()
        assert "the region r cannot be reached: GPU fake 0" in failed.details()
        item.position = position
        with refused(CODE.UNAVAILABLE, "the region r cannot be reached", "register it again"):
            append(cache, item)
        part = tensor_pb2.RegionPart(shared_memory_region="r", shared_memory_byte_size=MIB)
        with refused(CODE.UNAVAILABLE, "the region r cannot be reached"):
            cache.fetch(k_into=part)
        with pytest.raises(grpc.RpcError) as both:
            cache.fetch(k_into=part, v_into=part)
        assert both.value.details().count("cannot be reached") == 1, both.value.details()
        query = cache.item(position - 1, q=cache.queries(1))
        with refused(CODE.UNAVAILABLE, "the region r cannot be reached"):
            cache.stub.Attend(kv.AttendRequest(items=[query], results_into=part), timeout=TIMEOUT)
        with refused(CODE.UNAVAILABLE, "the GPU is not used now"):
            register_cuda(stub, "other", handle_of(at), MIB)
        cache.append(position, k, v)  # all others are served
        assert daemon.metric("qkvd_client_shm_lost_total") == 6 and daemon.metric("qkvd_gpu_down") == 1
        if fault.startswith("cuEventQuery"):
            return  # the other one waits those 10 s
        wait_for(lambda: daemon.metric("qkvd_gpu_down") == 0, "the GPU is not opened again")
        item.position = position + 16
        with refused(CODE.UNAVAILABLE, "register it again"):
            append(cache, item)
        register_cuda(stub, "r", handle_of(at), 2 * MIB)  # takes the place of the one that is gone
        assert append(cache, item).tokens == 16
        assert cuda_regions(stub) == [("r", 0, 2 * MIB)]


def test_a_driver_that_has_no_memory(kernels):  # noqa: F811
    for fault, code in (("cuIpcOpenMemHandle:1:2", CODE.RESOURCE_EXHAUSTED), ("cuIpcOpenMemHandle:1:719", CODE.UNAVAILABLE),
                        ("cuMemGetAddressRange:1:1", CODE.INVALID_ARGUMENT)):
        with with_gpu(kernels, "--allow-client-shm", FAKE_CUDA_FAIL=fault) as daemon, Object(MIB) as at:
            stub = shared_memory_pb2_grpc.SharedMemoryStub(daemon.channel())
            with refused(code, "raw_handle cannot be opened", "GPU fake 0"):
                register_cuda(stub, "r", handle_of(at), MIB)
            assert daemon.metric("qkvd_client_shm_regions") == 0
            assert daemon.metric("qkvd_gpu_down") == (code == CODE.UNAVAILABLE)
