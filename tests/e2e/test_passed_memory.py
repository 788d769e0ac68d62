"""Memory without a name, whose descriptors clients pass by --shm-listen: memfds and allocations of the fake GPU, and
clients that misbehave there."""

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time

import grpc
import numpy as np
import pytest

from daemon import Daemon, wait_for
from kv import FP32, TIMEOUT, Cache, refused, tensor
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import shared_memory_pb2 as shm
from qkv.v1 import shared_memory_pb2_grpc, tensor_pb2
from test_cuda_memory import memory  # noqa: F401
from test_cuda_memory import cuda_regions, unregister_cuda
from test_gpu import kernels_in, with_gpu
from test_shared_memory import make_cache  # noqa: F401
from test_shared_memory import MIB, append, append_item, lying, regions, unregister

CODE = grpc.StatusCode
GREETING = b"qkvdfd\x01\x00"
EACH = 128 << 10


def start(folder, *arguments):
    """With a GPU, and a socket for descriptors."""
    daemon = with_gpu(kernels_in(folder), "--allow-client-shm", "--shm-listen", f"unix:{folder}/shm.sock", *arguments)
    daemon.shm_path = f"{folder}/shm.sock"
    return daemon


def connect(daemon):
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(TIMEOUT)
    client.connect(daemon.shm_path)
    return client


def answer(client):
    """The code and the text."""
    data = b""
    while part := client.recv(4096):
        data += part
    return (data[0], data[1:].decode()) if data else None


def send(daemon, descriptors, message=GREETING):
    with connect(daemon) as client:
        socket.send_fds(client, [message], descriptors)
        return answer(client)


def token_of(daemon, descriptors):
    code, token = send(daemon, descriptors)
    assert code == 0 and len(token) == 32, (code, token)
    return token


class Memfd:
    def __init__(self, size, seals=fcntl.F_SEAL_SHRINK, content=None):
        self.fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.truncate(self.fd, size)
        if content is not None:
            os.pwrite(self.fd, content, 0)
        if seals:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)

    def place(self, at, array):
        os.pwrite(self.fd, array.tobytes(), at)

    def read(self, at, dtype, shape):
        return np.frombuffer(os.pread(self.fd, int(np.prod(shape)) * np.dtype(dtype).itemsize, at), dtype).reshape(shape)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.fd)


def register(stub, name, token, size, offset=0, key="", metadata=()):
    region = shm.SystemSharedMemoryRegion(name=name, key=key, offset=offset, byte_size=size)
    stub.SystemSharedMemoryRegister(shm.SystemSharedMemoryRegisterRequest(region=region, descriptor=token),
                                    timeout=TIMEOUT, metadata=metadata)


def register_cuda(stub, name, token, size, each=EACH, offset=0, handle=b""):
    region = shm.CudaSharedMemoryRegion(name=name, byte_size=size)
    stub.CudaSharedMemoryRegister(shm.CudaSharedMemoryRegisterRequest(
        region=region, raw_handle=handle, offset=offset, descriptor=token, descriptor_bytes=each), timeout=TIMEOUT)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with start(tmp_path_factory.mktemp("passed")) as daemon:
        yield daemon


def open_descriptors(daemon):
    """How many memfds of these tests the daemon has open, mapped ones aside."""
    folder, count = f"/proc/{daemon.process.pid}/fd", 0
    for name in os.listdir(folder):
        try:
            count += "memfd:test" in os.readlink(os.path.join(folder, name))
        except FileNotFoundError:
            pass
    return count


def waiting(daemon):
    return daemon.metric("qkvd_client_shm_descriptors")


def rows_cross(cache, at, name):
    """Append from, attend with, and fetch into a region of 1 MiB."""
    k, v = cache.rows(300)
    q = cache.queries(1)
    at.place(0, k)
    at.place(MIB // 4, v)
    assert append(cache, append_item(cache, 0, k=lying(name, 0, k), v=lying(name, MIB // 4, v))).tokens == 300
    for fetched, sent in zip(cache.fetch(), (k, v)):
        assert np.array_equal(fetched, sent)
    at.place(MIB // 2, q)
    item = append_item(cache, 299, q=lying(name, MIB // 2, q))
    item.options.precision = kv.AttendOptions.PRECISION_FP32
    answer_to = tensor_pb2.RegionPart(shared_memory_region=name, shared_memory_offset=MIB // 2 + 65536,
                                      shared_memory_byte_size=65536)
    (result,) = cache.stub.Attend(kv.AttendRequest(items=[item], results_into=answer_to), timeout=TIMEOUT).results
    out, lse = cache.attend(299, q)
    assert np.array_equal(at.read(result.out.shared_memory_offset, "<f4", out.shape), out)
    assert np.array_equal(at.read(result.lse.shared_memory_offset, "<f4", lse.shape), lse)
    into = tensor_pb2.RegionPart(shared_memory_region=name, shared_memory_offset=3 * MIB // 4 - 20000,
                                 shared_memory_byte_size=k.nbytes)
    list(cache.stub.Fetch(kv.FetchRequest(session=cache.name, layers=[0], dtype=FP32, k_into=into), timeout=TIMEOUT))
    assert np.array_equal(at.read(3 * MIB // 4 - 20000, "<f4", k.shape), k)


class Several:
    """Memfds of EACH bytes, one behind the other."""

    def __init__(self, count):
        self.parts = [Memfd(EACH, seals=0) for _ in range(count)]

    def place(self, at, array):
        data = array.tobytes()
        for i in range(0, len(data), 4096):  # no part ends within one of these
            piece, to = data[i:i + 4096], at + i
            left = EACH - to % EACH
            os.pwrite(self.parts[to // EACH].fd, piece[:left], to % EACH)
            if len(piece) > left:
                os.pwrite(self.parts[to // EACH + 1].fd, piece[left:], 0)

    def read(self, at, dtype, shape):
        whole = b"".join(os.pread(part.fd, EACH, 0) for part in self.parts)
        return np.frombuffer(whole, dtype, int(np.prod(shape)), at).reshape(shape)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for part in self.parts:
            os.close(part.fd)


def test_a_memfd(server, memory, make_cache):
    with Memfd(2 * MIB) as at:
        token = token_of(server, [at.fd])
        assert waiting(server) == 1
        register(memory, "r", token, MIB)
        assert regions(memory) == [("r", "", 0, MIB)]
        rows_cross(make_cache(recent_window=10000), at, "r")
        for name in ("r", "other"):  # used once
            with refused(CODE.NOT_FOUND, "descriptor is no token", "used once"):
                register(memory, name, token, MIB)
        register(memory, "r", token_of(server, [at.fd]), MIB)  # the same object: the same region
        with refused(CODE.ALREADY_EXISTS, "region.name r", "behind descriptor"):
            register(memory, "r", token_of(server, [at.fd]), MIB, 4096)
        register(memory, "rest", token_of(server, [at.fd]), 2 * MIB - 4099, 4099)
    unregister(memory)
    # That of the refused one waits for its time; the others are closed once they are mapped.
    wait_for(lambda: open_descriptors(server) == waiting(server) == 1, "descriptors stay open")


def test_allocations_of_a_gpu(server, memory, make_cache):
    with Several(8) as at:
        descriptors = [part.fd for part in at.parts]
        register_cuda(memory, "r", token_of(server, descriptors), MIB)
        assert cuda_regions(memory) == [("r", 0, MIB)]
        rows_cross(make_cache(recent_window=10000), at, "r")
        with refused(CODE.ALREADY_EXISTS, "region.name r", "on the GPU"):
            register_cuda(memory, "r", token_of(server, descriptors), MIB)
        register_cuda(memory, "part", token_of(server, descriptors[1:3]), EACH, offset=EACH)
        unregister_cuda(memory)


def test_what_is_refused_of_a_memfd(server, memory, tmp_path):
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.truncate(plain, 8192)
    folder, null = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY), os.open("/dev/null", os.O_RDWR)
    pipe, pair = os.pipe(), socket.socketpair()
    with Memfd(8192) as good, Memfd(8192, seals=0) as open_end, Memfd(8192, fcntl.F_SEAL_GROW) as grows, \
            Memfd(8192, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE) as fixed:
        reading = os.open(f"/proc/self/fd/{good.fd}", os.O_RDONLY)
        for descriptors, size, offset, code, *texts in (
            ([plain], 1, 0, CODE.INVALID_ARGUMENT, "descriptor is no memfd"),
            ([folder], 1, 0, CODE.INVALID_ARGUMENT, "descriptor is no memfd"),
            ([null], 1, 0, CODE.INVALID_ARGUMENT, "descriptor is no memfd"),
            ([pipe[0]], 1, 0, CODE.INVALID_ARGUMENT, "descriptor is no memfd"),
            ([pair[0].fileno()], 1, 0, CODE.INVALID_ARGUMENT, "descriptor is no memfd"),
            ([open_end.fd], 1, 0, CODE.INVALID_ARGUMENT, "descriptor", "F_SEAL_SHRINK"),
            ([grows.fd], 1, 0, CODE.INVALID_ARGUMENT, "descriptor", "F_SEAL_SHRINK"),
            ([fixed.fd], 1, 0, CODE.PERMISSION_DENIED, "cannot be mapped"),
            ([reading], 1, 0, CODE.PERMISSION_DENIED, "cannot be mapped"),
            ([good.fd] * 2, 1, 0, CODE.INVALID_ARGUMENT, "descriptor stands for 2"),
            ([good.fd], 8193, 0, CODE.INVALID_ARGUMENT, "region.byte_size 8193", "8192 bytes"),
            ([good.fd], 1, 8192, CODE.INVALID_ARGUMENT, "region.offset is 8192"),
            ([good.fd], 0, 0, CODE.INVALID_ARGUMENT, "region.byte_size is 0"),
            ([good.fd], 2, 2**64 - 1, CODE.INVALID_ARGUMENT, "region.offset"),
        ):
            with refused(code, *texts):
                register(memory, "r", token_of(server, descriptors), size, offset)
        token = token_of(server, [good.fd])
        with refused(CODE.INVALID_ARGUMENT, "region.key is set, and so is descriptor"):
            register(memory, "r", token, 1, key="/r")
        register(memory, "r", token, 8192)  # what failed has not used it
        os.close(reading)
    for text, code in (("x", CODE.INVALID_ARGUMENT), ("0" * 33, CODE.INVALID_ARGUMENT), ("0" * 32, CODE.NOT_FOUND)):
        with refused(code, "descriptor"):
            register(memory, "r", text, 1)
    for one in (plain, folder, null, *pipe):
        os.close(one)
    for one in pair:
        one.close()


def test_what_is_refused_of_a_gpu(server, memory, tmp_path):
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with Several(2) as at:
        descriptors = [part.fd for part in at.parts]
        for given, size, each, offset, *texts in (
            ([folder], 1, EACH, 0, "descriptor cannot be opened", "cuMemImportFromShareableHandle"),
            (descriptors[:1] + [folder], 1, EACH, 0, "descriptor cannot be opened", "cuMemImportFromShareableHandle"),
            (descriptors, 1, 2 * EACH, 0, "descriptor cannot be opened", "cuMemMap"),
            (descriptors, 1, 1000, 0, "descriptor cannot be opened", "cuMemAddressReserve"),
            (descriptors, 1, 0, 0, "descriptor_bytes is 0"),
            (descriptors, 1, 2**63, 0, "descriptor_bytes is 9223372036854775808"),
            (descriptors, 2 * EACH + 1, EACH, 0, "region.byte_size", "descriptor has 262144 bytes"),
            (descriptors, 2 * EACH, EACH, 1, "offset is 1"),
        ):
            with refused(CODE.INVALID_ARGUMENT, *texts):
                register_cuda(memory, "r", token_of(server, given), size, each, offset)
        token = token_of(server, descriptors)
        with refused(CODE.INVALID_ARGUMENT, "raw_handle is set, and so is descriptor"):
            register_cuda(memory, "r", token, 1, handle=bytes(64))
        register_cuda(memory, "r", token, 2 * EACH)
    os.close(folder)
    assert server.metric("qkvd_gpu_down") == 0


def test_messages_that_are_none(server):
    with Memfd(4096) as at:
        for message, count, text in ((GREETING, 0, "no descriptor"), (GREETING, 65, "more than 64"),
                                     (GREETING, 253, "more than 64"), (b"q", 1, "is not the 8 bytes"),
                                     (GREETING + b"x", 1, "is not the 8 bytes"), (b"GET / HT", 1, "is not the 8 bytes"),
                                     (b"qkvdfd\x02\x00", 1, "is not the 8 bytes")):
            code, said = send(server, [at.fd] * count, message)
            assert code == CODE.INVALID_ARGUMENT.value[0] and text in said, said
        with connect(server) as client, contextlib.suppress(OSError):
            socket.send_fds(client, [bytes(100000)], [at.fd] * 3)  # more than is read: closed, as if reset
            answer(client)
        with connect(server):
            pass  # says nothing, and goes
        with connect(server) as client:
            socket.send_fds(client, [GREETING], [at.fd])  # goes without its token
    wait_for(lambda: open_descriptors(server) == waiting(server), "descriptors are left open")


def test_slow_clients_hold_up_nobody(server):
    began = time.monotonic()
    silent = [connect(server) for _ in range(15)]
    with Memfd(4096) as at:
        token_of(server, [at.fd])
        assert time.monotonic() - began < 1.5
    more = [connect(server) for _ in range(10)]
    refusals = [answer(client) for client in more[1:]]
    assert all(code == CODE.RESOURCE_EXHAUSTED.value[0] and "has 16 connections" in text for code, text in refusals)
    for client in silent + more[:1]:
        code, text = answer(client)
        assert code == CODE.DEADLINE_EXCEEDED.value[0] and text == "no message within 2 s"
    for client in silent + more:
        client.close()


def test_a_client_that_passes_thousands(tmp_path):
    """What waits is bounded, others are served, and all is closed when its time is over."""
    with start(tmp_path) as daemon, Memfd(4096) as at:
        codes = [send(daemon, [at.fd] * 64)[0] for _ in range(157)]  # 10,048 descriptors
        assert codes[:2] == [0, 0] and set(codes[2:]) == {CODE.RESOURCE_EXHAUSTED.value[0]}
        code, text = send(daemon, [at.fd])
        assert "wait to be registered, at most 128" in text
        assert waiting(daemon) == open_descriptors(daemon) == 128
        cache = Cache(daemon.stub(), "s")
        cache.append(0, *cache.rows(3))
        began = time.monotonic()
        wait_for(lambda: waiting(daemon) == 0, "descriptors stay")
        assert time.monotonic() - began < 12
        wait_for(lambda: open_descriptors(daemon) == 0, "descriptors stay open")
        token_of(daemon, [at.fd])
        assert daemon.metric("qkvd_client_shm_passed_total") == 3
        assert daemon.metric("qkvd_client_shm_passed_refused_total") == 156
        token_of(daemon, [at.fd])  # the daemon ends while it waits


def test_clients_at_once(server, memory):
    """Tokens are used, left, wrong and used twice by many at the same time."""
    outcomes, lock = {}, threading.Lock()

    def work(number):
        with Memfd(8192) as at:
            for i in range(30):
                code, token = send(server, [at.fd])
                name = f"r{number}-{i % 3}"
                try:
                    if code != 0:
                        raise ValueError
                    register(memory, name, token, 4096)
                    unregister(memory, name)
                    register(memory, name, token, 4096)
                    result = "twice"
                except ValueError:
                    result = "full"
                except grpc.RpcError as error:
                    result = error.code()
                with lock:
                    outcomes[result] = outcomes.get(result, 0) + 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(outcomes) <= {"full", CODE.NOT_FOUND} and outcomes[CODE.NOT_FOUND] > 100, outcomes


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes others")
def test_a_token_is_its_users(server, memory):
    """Another user gets a connection, and cannot use what was passed here."""
    os.chmod(server.folder.name, 0o755)
    os.chmod(server.socket, 0o777)
    code = ("import sys, grpc\n"
            "from qkv.v1 import shared_memory_pb2 as shm, shared_memory_pb2_grpc\n"
            "stub = shared_memory_pb2_grpc.SharedMemoryStub(grpc.insecure_channel(sys.argv[1]))\n"
            "region = shm.SystemSharedMemoryRegion(name='r', byte_size=1)\n"
            "try:\n"
            "    stub.SystemSharedMemoryRegister(shm.SystemSharedMemoryRegisterRequest(\n"
            "        region=region, descriptor=sys.argv[2]), timeout=60)\n"
            "except grpc.RpcError as error:\n"
            "    print(error.code().name, error.details())\n")
    with Memfd(4096) as at:
        token = token_of(server, [at.fd])
        run = subprocess.run(["setpriv", "--reuid", "12345", "--clear-groups", sys.executable, "-c", code, server.target,
                              token], capture_output=True, text=True, timeout=TIMEOUT)
        assert run.stdout.startswith("NOT_FOUND descriptor is no token of user 12345"), run
        register(memory, "r", token, 4096)


def test_names_are_the_tenants(server, memory, make_cache):
    own, other = (("qkv-tenant", "a"),), (("qkv-tenant", "b"),)
    cache = make_cache()
    k, v = cache.rows(3)
    with Memfd(4096) as at:
        register(memory, "r", token_of(server, [at.fd]), 4096, metadata=own)
        with refused(CODE.NOT_FOUND, "r is not registered"):
            regions(memory, "r", other)
        with refused(CODE.NOT_FOUND, "k.shared_memory_region r is not registered"):
            append(cache, append_item(cache, 0, k=lying("r", 0, k), v=tensor(v)))
        unregister(memory, "r", own)


def test_a_memfd_cannot_be_shortened(server, memory, make_cache):
    cache = make_cache(recent_window=1000)
    k, v = cache.rows(8)
    with Memfd(MIB) as at:
        register(memory, "r", token_of(server, [at.fd]), MIB)
        with pytest.raises(PermissionError):
            os.truncate(at.fd, 0)
        at.place(0, k)
        append(cache, append_item(cache, 0, k=lying("r", 0, k), v=tensor(v)))
        assert np.array_equal(cache.fetch()[0], k)


def test_tcp_and_missing_options(server, tmp_path):
    with Memfd(4096) as at:
        stub = shared_memory_pb2_grpc.SharedMemoryStub(server.channel(server.tcp))
        with refused(CODE.PERMISSION_DENIED, "unix socket"):
            register(stub, "r", token_of(server, [at.fd]), 1)
    server.disconnect()
    with Daemon("--allow-client-shm") as daemon:
        stub = shared_memory_pb2_grpc.SharedMemoryStub(daemon.channel())
        with refused(CODE.UNIMPLEMENTED, "descriptor is set", "--shm-listen"):
            register(stub, "r", "0" * 32, 1)
    for arguments, text in ((("--shm-listen", f"unix:{tmp_path}/s"), "--shm-listen needs --allow-client-shm"),
                            (("--allow-client-shm", "--shm-listen", "127.0.0.1:0"), "must be unix:PATH"),
                            (("--allow-client-shm", "--shm-listen", "unix:" + "x" * 200), "--shm-listen: listen is"),
                            (("--allow-client-shm", "--shm-listen", f"unix:{server.shm_path}"), "--shm-listen: another")):
        with pytest.raises(AssertionError, match="did not get ready") as raised:
            Daemon(*arguments)
        assert text in str(raised.value)
