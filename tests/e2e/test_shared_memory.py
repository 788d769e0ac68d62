"""Rows that lie in the client's shared memory: registered regions, copies from and to them, and clients that misbehave."""

import hashlib
import os
import subprocess
import sys
import tempfile
import threading
from multiprocessing import shared_memory

import grpc
import numpy as np
import pytest

from daemon import Daemon, wait_for
from kv import FP16, FP32, TIMEOUT, Cache, array_of, encode, refused, tensor
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import shared_memory_pb2 as shm
from qkv.v1 import shared_memory_pb2_grpc, tensor_pb2

MIB = 1 << 20
CODE = grpc.StatusCode


@pytest.fixture(scope="module")
def server():
    with Daemon("--allow-client-shm") as daemon:
        yield daemon


@pytest.fixture
def memory(server):
    """Names of this test's own are given back however it ends."""
    stub = shared_memory_pb2_grpc.SharedMemoryStub(server.channel())
    yield stub
    stub.SystemSharedMemoryUnregister(shm.SystemSharedMemoryUnregisterRequest(), timeout=TIMEOUT)
    server.disconnect()


@pytest.fixture
def make_cache(server, request):
    count = iter(range(100))
    return lambda **fields: Cache(server.stub(), f"{request.node.name.replace('[', '-').replace(']', '')}-{next(count)}",
                                  **fields)


class Object:
    """An object of shared memory, filled with 0x5a."""

    def __init__(self, size):
        self.memory = shared_memory.SharedMemory(create=True, size=size)
        self.key, self.size = "/" + self.memory.name, size
        self.path = "/dev/shm/" + self.memory.name
        self.memory.buf[:] = b"\x5a" * size

    def place(self, at, array):
        data = array.tobytes()
        self.memory.buf[at:at + len(data)] = data
        return len(data)

    def read(self, at, dtype, shape):
        count = int(np.prod(shape))
        return np.frombuffer(bytes(self.memory.buf[at:at + count * np.dtype(dtype).itemsize]), dtype).reshape(shape)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.memory.close()
        self.memory.unlink()


def register(stub, name, key, offset, size, metadata=()):
    region = shm.SystemSharedMemoryRegion(name=name, key=key, offset=offset, byte_size=size)
    stub.SystemSharedMemoryRegister(shm.SystemSharedMemoryRegisterRequest(region=region), timeout=TIMEOUT,
                                    metadata=metadata)


def regions(stub, name="", metadata=()):
    request = shm.SystemSharedMemoryStatusRequest(name=name)
    answer = stub.SystemSharedMemoryStatus(request, timeout=TIMEOUT, metadata=metadata)
    return [(region.name, region.key, region.offset, region.byte_size) for region in answer.regions]


def unregister(stub, name="", metadata=()):
    stub.SystemSharedMemoryUnregister(shm.SystemSharedMemoryUnregisterRequest(name=name), timeout=TIMEOUT,
                                      metadata=metadata)


def lying(region, at, array, dtype=FP32, size=None):
    """The tensor message of an array that lies at byte `at` of a region."""
    encoded = encode(array, dtype)
    return tensor_pb2.Tensor(dtype=dtype, dims=encoded.shape, shared_memory_region=region, shared_memory_offset=at,
                             shared_memory_byte_size=encoded.nbytes if size is None else size)


def append_item(cache, position, **tensors):
    item = cache.item(position)
    for field, message in tensors.items():
        getattr(item, field).CopyFrom(message)
    return item


def append(cache, *items):
    return cache.stub.Append(iter([kv.AppendRequest(items=items)]), timeout=TIMEOUT)


def test_regions_are_listed_and_removed(server, memory):
    with Object(3 * MIB) as a, Object(4096) as b:
        register(memory, "a", a.key, 0, MIB)
        register(memory, "rest", a.key[1:], MIB + 3, 2 * MIB - 3)
        register(memory, "b", b.key, 4095, 1)
        assert regions(memory) == [("a", a.key, 0, MIB), ("rest", a.key, MIB + 3, 2 * MIB - 3), ("b", b.key, 4095, 1)]
        assert regions(memory, "rest") == [("rest", a.key, MIB + 3, 2 * MIB - 3)]
        assert server.metric("qkvd_client_shm_regions") == 3
        assert server.metric("qkvd_client_shm_bytes") == 3 * MIB - 2
        register(memory, "a", a.key, 0, MIB)  # the same once more
        with refused(CODE.ALREADY_EXISTS, "region.name a", a.key):
            register(memory, "a", a.key, 0, MIB - 1)
        unregister(memory, "a")
        register(memory, "a", b.key, 0, 4096)
        unregister(memory)
        assert regions(memory) == [] and server.metric("qkvd_client_shm_bytes") == 0
        for call in (unregister, regions):
            with refused(CODE.NOT_FOUND, "a is not registered"):
                call(memory, "a")


def test_what_is_refused(server, memory):
    with Object(8192) as there:
        for name, key, offset, size, code, *texts in (
            ("", there.key, 0, 1, CODE.INVALID_ARGUMENT, "region.name"),
            ("a b", there.key, 0, 1, CODE.INVALID_ARGUMENT, "region.name"),
            ("x" * 129, there.key, 0, 1, CODE.INVALID_ARGUMENT, "region.name"),
            ("r", "", 0, 1, CODE.INVALID_ARGUMENT, "region.key", "1 to 255"),
            ("r", "/" + "x" * 256, 0, 1, CODE.INVALID_ARGUMENT, "region.key", "256"),
            ("r", "/../etc/passwd", 0, 1, CODE.INVALID_ARGUMENT, "region.key", "no path"),
            ("r", "..", 0, 1, CODE.INVALID_ARGUMENT, "region.key", "no path"),
            ("r", "//" + there.key[1:], 0, 1, CODE.INVALID_ARGUMENT, "region.key", "no path"),
            ("r", "/no-such-object", 0, 1, CODE.NOT_FOUND, "region.key /no-such-object"),
            ("r", there.key, 0, 0, CODE.INVALID_ARGUMENT, "region.byte_size is 0"),
            ("r", there.key, 0, 8193, CODE.INVALID_ARGUMENT, "8193", "8192 bytes"),
            ("r", there.key, 8192, 1, CODE.INVALID_ARGUMENT, "region.offset is 8192"),
            ("r", there.key, 2**64 - 1, 2, CODE.INVALID_ARGUMENT, "region.offset"),
            ("r", there.key, 1, 2**64 - 1, CODE.INVALID_ARGUMENT, "region.byte_size"),
        ):
            with refused(code, *texts):
                register(memory, name, key, offset, size)
        assert regions(memory) == []
        stub = shared_memory_pb2_grpc.SharedMemoryStub(server.channel(server.tcp))
        with refused(CODE.PERMISSION_DENIED, "unix socket"):
            register(stub, "r", there.key, 0, 1)
        with refused(CODE.INVALID_ARGUMENT, "region is missing"):
            memory.SystemSharedMemoryRegister(shm.SystemSharedMemoryRegisterRequest(), timeout=TIMEOUT)


def test_links_pipes_and_folders_are_no_objects(memory, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(4096))
    stem = f"/dev/shm/qkvd-test-{os.getpid()}"
    os.symlink(secret, stem + "-link")
    os.mkfifo(stem + "-pipe")
    os.mkdir(stem + "-folder")
    try:
        for kind in ("link", "pipe", "folder"):
            with refused(CODE.INVALID_ARGUMENT, "region.key"):
                register(memory, "r", f"{os.path.basename(stem)}-{kind}", 0, 1)
    finally:
        os.unlink(stem + "-link")
        os.unlink(stem + "-pipe")
        os.rmdir(stem + "-folder")


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives objects away")
def test_objects_of_another_user_are_refused(memory):
    with Object(4096) as there:
        os.chown(there.path, 12345, -1)
        os.chmod(there.path, 0o666)
        with refused(CODE.PERMISSION_DENIED, "user 12345", "the client's is 0"):
            register(memory, "r", there.key, 0, 4096)


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes others")
def test_a_user_who_stands_for_many_is_refused(server):
    """As nobody, whom systemd's PrivateUsers shows in the place of every other user."""
    os.chmod(server.folder.name, 0o755)
    os.chmod(server.socket, 0o777)
    with Object(4096) as there:
        os.chown(there.path, 65534, -1)
        code = ("import sys, grpc\n"
                "from qkv.v1 import shared_memory_pb2 as shm, shared_memory_pb2_grpc\n"
                "stub = shared_memory_pb2_grpc.SharedMemoryStub(grpc.insecure_channel(sys.argv[1]))\n"
                "region = shm.SystemSharedMemoryRegion(name='r', key=sys.argv[2], byte_size=1)\n"
                "try:\n"
                "    stub.SystemSharedMemoryRegister(shm.SystemSharedMemoryRegisterRequest(region=region), timeout=60)\n"
                "except grpc.RpcError as error:\n"
                "    print(error.code().name, error.details())\n")
        run = subprocess.run(["setpriv", "--reuid", "65534", "--clear-groups", sys.executable, "-c", code, server.target,
                              there.key], capture_output=True, text=True, timeout=TIMEOUT)
        assert run.stdout.startswith("PERMISSION_DENIED") and "stands for every user" in run.stdout, run


def test_without_the_option_nothing_is_served(make_cache):
    with Daemon() as daemon, Object(4096) as there:
        stub = shared_memory_pb2_grpc.SharedMemoryStub(daemon.channel())
        for call in (lambda: register(stub, "r", there.key, 0, 1), lambda: regions(stub), lambda: unregister(stub)):
            with refused(CODE.UNIMPLEMENTED, "--allow-client-shm"):
                call()
        cache = Cache(daemon.stub(), "s")
        k, v = cache.rows(3)
        with refused(CODE.UNIMPLEMENTED, "items[0].k.shared_memory_region", "--allow-client-shm"):
            append(cache, append_item(cache, 0, k=lying("r", 0, k), v=tensor(v)))
        part = tensor_pb2.RegionPart(shared_memory_region="r", shared_memory_byte_size=1)
        with refused(CODE.UNIMPLEMENTED, "k_into", "--allow-client-shm"):
            cache.fetch(k_into=part)
        item = cache.item(0, q=cache.queries(1))
        with refused(CODE.UNIMPLEMENTED, "results_into", "--allow-client-shm"):
            cache.stub.Attend(kv.AttendRequest(items=[item], results_into=part), timeout=TIMEOUT)


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("tokens", [3, 700])  # a thread of the completion queue, and a job
def test_rows_from_and_to_shared_memory(server, memory, make_cache, dtype, tokens):
    here, there = (make_cache(dtype=dtype, recent_window=10000) for _ in range(2))
    k, v = here.rows(tokens)
    read, written = (server.metric(f"qkvd_client_shm_{what}_bytes_total") for what in ("read", "written"))
    with Object(4 * MIB) as at:
        register(memory, "r", at.key, 100, 4 * MIB - 100)
        size = at.place(100 + 7, encode(k, dtype))  # of no particular alignment
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
        position, places = 0, [2 * MIB, 3 * MIB]
        for piece in here.stub.Fetch(request, timeout=TIMEOUT):
            assert piece.position == position
            position += piece.k.dims[0]
            for i, part in enumerate((piece.k, piece.v)):
                assert part.shared_memory_region == "r" and part.data == b""
                assert part.shared_memory_offset == places[i]
                places[i] += part.shared_memory_byte_size
        assert position == tokens and places == [2 * MIB + size, 3 * MIB + size]
        kind = {FP32: "<f4", FP16: "<f2"}[dtype]
        for offset, array in ((2 * MIB, k), (3 * MIB, v)):
            assert np.array_equal(at.read(100 + offset, kind, array.shape), encode(array, dtype))
            assert bytes(at.memory.buf[100 + offset + size:100 + offset + size + 64]) == b"\x5a" * 64
        assert server.metric("qkvd_client_shm_read_bytes_total") - read == 2 * size
        assert server.metric("qkvd_client_shm_written_bytes_total") - written == 2 * size


def test_strides_reach_over_gaps(memory, make_cache):
    cache = make_cache(recent_window=1000)
    k, v = cache.rows(9)
    with Object(MIB) as at:
        register(memory, "r", at.key, 0, MIB)
        heads_first = np.ascontiguousarray(k.transpose(1, 0, 2))
        at.place(64, heads_first)
        message = lying("r", 64, k)
        message.strides.extend(heads_first.transpose(1, 0, 2).strides)
        append(cache, append_item(cache, 0, k=message, v=tensor(v)))
        assert np.array_equal(cache.fetch()[0], k)
        message.strides[0] = 1 << 20
        with refused(CODE.INVALID_ARGUMENT, "items[0].k.shared_memory_byte_size", "8389248"):
            append(cache, append_item(cache, 9, k=message, v=tensor(v)))
        message.strides[0] = 1 << 40
        message.shared_memory_byte_size = 1 << 50
        with refused(CODE.INVALID_ARGUMENT, "items[0].k.strides", "limit-message"):
            append(cache, append_item(cache, 9, k=message, v=tensor(v)))


def test_heads_first_and_one_part(memory, make_cache):
    cache = make_cache(recent_window=1000)
    k, v = cache.rows(70)
    cache.append(0, k, v)
    with Object(MIB) as at:
        register(memory, "r", at.key, 0, MIB)
        part = tensor_pb2.RegionPart(shared_memory_region="r", shared_memory_byte_size=k.nbytes)
        request = kv.FetchRequest(session=cache.name, layers=[0], v_into=part, part=kv.FetchRequest.PART_V,
                                  layout=kv.ROW_LAYOUT_HEADS_FIRST)
        (piece,) = cache.stub.Fetch(request, timeout=TIMEOUT)
        assert list(piece.v.dims) == [2, 70, 16] and not piece.HasField("k")
        assert np.array_equal(at.read(0, "<f4", (2, 70, 16)), v.transpose(1, 0, 2))
        request.part, request.k_into.shared_memory_region = kv.FetchRequest.PART_V, "r"
        with refused(CODE.INVALID_ARGUMENT, "k_into is set"):
            list(cache.stub.Fetch(request, timeout=TIMEOUT))


@pytest.mark.parametrize("out_dtype", [0, FP16])
@pytest.mark.parametrize("queries", [1, 64])
def test_attention_from_and_into_shared_memory(memory, make_cache, out_dtype, queries):
    cache = make_cache(recent_window=16)
    cache.append(0, *cache.rows(300))
    q = cache.queries(queries)
    expected = cache.attend(299, q, out_dtype=out_dtype)
    with Object(MIB) as at:
        register(memory, "r", at.key, 0, MIB)
        at.place(0, q)
        items = []
        for _ in range(2):
            item = cache.item(299)
            item.q.CopyFrom(lying("r", 0, q))
            item.options.precision = kv.AttendOptions.PRECISION_FP32
            items.append(item)
        into = tensor_pb2.RegionPart(shared_memory_region="r", shared_memory_offset=MIB // 2,
                                     shared_memory_byte_size=MIB // 2)
        request = kv.AttendRequest(items=items, out_dtype=out_dtype, results_into=into, id=7)
        for answer in (cache.stub.Attend(request, timeout=TIMEOUT),
                       next(cache.stub.Decode(iter([request]), timeout=TIMEOUT))):
            assert answer.id == 7 and len(answer.results) == 2
            for result in answer.results:
                assert result.status.code == 0
                for message, array in ((result.out, expected[0]), (result.lse, expected[1])):
                    assert message.data == b"" and message.shared_memory_offset % 64 == 0
                    data = bytes(at.memory.buf[message.shared_memory_offset:][:message.shared_memory_byte_size])
                    placed = tensor_pb2.Tensor(dtype=message.dtype, dims=message.dims, data=data)
                    assert np.array_equal(array_of(placed), array)
        state = cache.state()
        request.results_into.shared_memory_byte_size = 100
        k, v = cache.rows(1)
        request.items[0].k.CopyFrom(tensor(k))
        request.items[0].v.CopyFrom(tensor(v))
        request.items[0].position = 300
        with refused(CODE.INVALID_ARGUMENT, "results_into.shared_memory_byte_size is 100"):
            cache.stub.Attend(request, timeout=TIMEOUT)
        assert cache.state() == state


def test_bad_parts_change_nothing(memory, make_cache):
    cache = make_cache(recent_window=1000)
    cache.append(0, *cache.rows(5))
    state = cache.state()
    k, v = cache.rows(3)
    with Object(MIB) as at:
        register(memory, "r", at.key, 0, MIB)
        at.place(0, k)
        both = lying("r", 0, k)
        both.data = k.tobytes()
        nan = k.copy()
        nan[1, 1, 5] = np.nan
        at.place(4096, nan)
        for message, code, texts in (
            (lying("none", 0, k), CODE.NOT_FOUND, ["k.shared_memory_region none is not registered"]),
            (lying("x" * 200, 0, k), CODE.INVALID_ARGUMENT, ["k.shared_memory_region has 200 bytes"]),
            (lying("r", MIB - 1, k), CODE.INVALID_ARGUMENT, ["k.shared_memory_offset is 1048575", "1048576 bytes"]),
            (lying("r", 2**64 - 8, k), CODE.INVALID_ARGUMENT, ["k.shared_memory_offset"]),
            (lying("r", 0, k, size=2**64 - 1), CODE.INVALID_ARGUMENT, ["k.shared_memory_offset is 0"]),
            (lying("r", 0, k, size=k.nbytes - 1), CODE.INVALID_ARGUMENT, ["k.shared_memory_byte_size is 383", "384"]),
            (lying("r", 0, k, size=0), CODE.INVALID_ARGUMENT, ["k.shared_memory_byte_size is 0"]),
            (both, CODE.INVALID_ARGUMENT, ["k.data is set", "shared_memory_region"]),
            (lying("r", 4096, nan), CODE.INVALID_ARGUMENT, ["k[1, 1, 5] is nan"]),
        ):
            with refused(code, "items[0]", *texts):
                append(cache, append_item(cache, 5, k=message, v=tensor(v)))
        for size in (0, 2 * v.nbytes):  # of 5 tokens
            part = tensor_pb2.RegionPart(shared_memory_region="r", shared_memory_byte_size=size)
            with refused(CODE.INVALID_ARGUMENT, "v_into.shared_memory_byte_size is too small" if size == 0 else ""):
                cache.fetch(v_into=part, coded=size > 0)
        assert cache.state() == state


def test_a_region_is_its_tenants(memory, make_cache):
    own, other = (("qkv-tenant", "own"),), (("qkv-tenant", "other"),)
    cache = make_cache()
    k, v = cache.rows(3)
    with Object(4096) as a, Object(4096) as b:
        register(memory, "r", a.key, 0, 4096, own)
        register(memory, "r", b.key, 0, 2048, other)
        assert regions(memory) == []
        assert regions(memory, metadata=own) == [("r", a.key, 0, 4096)]
        with refused(CODE.NOT_FOUND, "k.shared_memory_region r is not registered"):
            append(cache, append_item(cache, 0, k=lying("r", 0, k), v=tensor(v)))
        unregister(memory, metadata=other)
        assert regions(memory, metadata=own) == [("r", a.key, 0, 4096)]
        unregister(memory, "r", own)


def test_a_client_that_shortens_its_object(server, memory, make_cache):
    """Touching what is gone is SIGBUS: the calls fail, the daemon goes on."""
    cache = make_cache(recent_window=10000, key_dim=64, value_dim=64)
    k, v = cache.rows(600)  # 300 KiB each
    cache.append(0, k, v)
    state = cache.state()
    lost = server.metric("qkvd_client_shm_lost_total")
    with Object(MIB) as at:
        register(memory, "r", at.key, 0, MIB)
        at.place(0, k)
        for size in (4096, 0):
            os.truncate(at.path, size)
            with refused(CODE.FAILED_PRECONDITION, "items[0].k: the region r cannot be reached", "shorter"):
                append(cache, append_item(cache, 600, k=lying("r", 0, k), v=tensor(v)))
            item = append_item(cache, 599, q=lying("r", 4096, cache.queries(1)))
            with refused(CODE.FAILED_PRECONDITION, "items[0].q: the region r"):
                cache.stub.Attend(kv.AttendRequest(items=[item]), timeout=TIMEOUT)
            part = tensor_pb2.RegionPart(shared_memory_region="r", shared_memory_byte_size=MIB)
            with refused(CODE.FAILED_PRECONDITION, "the region r cannot be reached"):
                cache.fetch(k_into=part)
            with refused(CODE.FAILED_PRECONDITION, "the region r cannot be reached"):
                item = cache.item(599, q=cache.queries(1))
                part.shared_memory_offset = 8192
                part.shared_memory_byte_size = 65536
                cache.stub.Attend(kv.AttendRequest(items=[item], results_into=part), timeout=TIMEOUT)
        assert server.metric("qkvd_client_shm_lost_total") - lost == 8
        assert cache.state() == state
        os.truncate(at.path, MIB)  # and it is back
        at.place(0, k)
        assert append(cache, append_item(cache, 0, k=lying("r", 0, k), v=tensor(v))).tokens == 0


def test_clients_that_write_and_shorten_while_rows_are_read(server, memory, make_cache):
    """Whatever they do, rows are the ones that were checked, and the daemon lives."""
    cache = make_cache(layers=1, recent_window=100000, key_dim=64, value_dim=64)
    k, v = cache.rows(256)
    stop = threading.Event()
    with Object(2 * MIB) as at:
        register(memory, "r", at.key, 0, 2 * MIB)
        at.place(0, k)
        at.place(MIB, v)
        nan = np.full_like(k, np.nan).tobytes()

        def disturb():
            file = os.open(at.path, os.O_RDWR)
            while not stop.is_set():
                os.truncate(at.path, 65536)
                os.truncate(at.path, 2 * MIB)
                os.pwrite(file, nan, 0)
                os.pwrite(file, k.tobytes(), 0)
            os.close(file)

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
        assert outcomes <= {CODE.OK, CODE.FAILED_PRECONDITION, CODE.INVALID_ARGUMENT}
        assert len(outcomes) > 1
        if position > 0:
            assert np.isfinite(cache.fetch()[0]).all()


def append_while_regions_go(cache, at, come_and_go):
    """`come_and_go` registers `at` as "r" and unregisters it, again and again: an append has its rows, or finds no region."""
    k, v = cache.rows(64)
    at.place(0, k)
    at.place(MIB, v)
    stop = threading.Event()

    def run():
        while not stop.is_set():
            come_and_go()

    thread = threading.Thread(target=run)
    thread.start()
    outcomes = set()
    try:
        for _ in range(200):
            item = append_item(cache, 0, k=lying("r", 0, k), v=lying("r", MIB, v))
            try:
                append(cache, item)
                outcomes.add(CODE.OK)
            except grpc.RpcError as error:
                outcomes.add(error.code())
    finally:
        stop.set()
        thread.join()
    assert outcomes <= {CODE.OK, CODE.NOT_FOUND}


def test_unregistering_while_requests_run(memory, make_cache):
    cache = make_cache(layers=1, recent_window=100000, key_dim=64, value_dim=64)
    with Object(2 * MIB) as at:
        def come_and_go():
            register(memory, "r", at.key, 0, 2 * MIB)
            unregister(memory, "r")
        append_while_regions_go(cache, at, come_and_go)


def test_limits_and_what_outlives_what():
    with Daemon("--allow-client-shm", "--limit-client-shm", "2", "--limit-message", "1MiB") as daemon:
        stub = shared_memory_pb2_grpc.SharedMemoryStub(daemon.channel())
        there = Object(3 * MIB)
        register(stub, "a", there.key, 0, 3 * MIB)
        register(stub, "b", there.key, 0, 1)
        with refused(CODE.RESOURCE_EXHAUSTED, "limit-client-shm is 2"):
            register(stub, "c", there.key, 0, 1)
        cache = Cache(daemon.stub(), "s", key_dim=64, value_dim=64, recent_window=100000)
        k, v = cache.rows(1500)  # 750 KiB each: together more than a message
        there.place(0, k)
        there.place(MIB, v)
        with refused(CODE.INVALID_ARGUMENT, "1536000 bytes of rows", "limit-message is 1048576"):
            append(cache, append_item(cache, 0, k=lying("a", 0, k), v=lying("a", MIB, v)))
        there.__exit__()  # the region stays what it was
        k, v = k[:600], v[:600]
        append(cache, append_item(cache, 0, k=lying("a", 0, k), v=lying("a", MIB, v)))
        assert np.array_equal(cache.fetch()[0], k)
        # What a client maps is not the daemon's memory.
        wait_for(lambda: daemon.metric("qkvd_client_shm_regions") == 2, "metrics")
        unregister(stub)
        assert regions(stub) == []


def test_roles():
    token = "0123456789abcdef"
    with tempfile.NamedTemporaryFile("w") as file, Object(4096) as there:
        file.write(f"token sha256:{hashlib.sha256(token.encode()).hexdigest()} team read\n")
        file.flush()
        with Daemon("--allow-client-shm", "--auth-file", file.name) as daemon:
            metadata = (("authorization", f"Bearer {token}"),)
            stub = shared_memory_pb2_grpc.SharedMemoryStub(daemon.channel())
            assert regions(stub, metadata=metadata) == []
            with refused(CODE.PERMISSION_DENIED, "write"):
                register(stub, "r", there.key, 0, 1, metadata)


def test_results_bring_nothing_else(server, memory, make_cache):
    """What lies between the results of a call, and in the place of those that failed, stays as it is."""
    other, cache = make_cache(), make_cache(layers=2)
    pattern = np.full((20000, 2, 16), np.frombuffer(b"\xc3" * 4, "<f4")[0], np.float32)
    other.append(0, pattern, pattern, layer=0)
    for _ in range(3):  # memory that the daemon has had other tenants' rows in
        other.fetch()
    cache.append(0, *cache.rows(4))
    with Object(32 * MIB) as there:
        register(memory, "into", there.key, 0, there.size)
        gap = cache.item(100, *cache.rows(1), q=np.ones((50000, 4, 16), np.float32), layer=1)
        good = cache.item(3, q=cache.queries(1))
        answer = cache.stub.Attend(kv.AttendRequest(items=[gap, good], results_into=tensor_pb2.RegionPart(
            shared_memory_region="into", shared_memory_byte_size=there.size)), timeout=TIMEOUT)
        assert [result.status.code for result in answer.results] == [CODE.FAILED_PRECONDITION.value[0], 0]
        written = np.zeros(there.size, bool)
        for part in answer.results[1].out, answer.results[1].lse:
            written[part.shared_memory_offset:part.shared_memory_offset + part.shared_memory_byte_size] = True
        assert written.sum() == 4 * 16 * 4 + 4 * 4
        assert (np.frombuffer(there.memory.buf, np.uint8)[~written] == 0x5A).all()
