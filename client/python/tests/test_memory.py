"""Rows in memory that the daemon opens: objects of shm_open and memfds. Nothing of them crosses the socket."""

import fcntl
import os
from multiprocessing import shared_memory

import numpy as np
import pytest
from daemon import Daemon

import qkvd
from qkvd import memory

MIB = 1 << 20


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    path = f"{tmp_path_factory.mktemp('passing')}/shm.sock"
    with Daemon("--limit-models", "1000", "--allow-client-shm", "--shm-listen", f"unix:{path}") as running:
        running.passing = path
        yield running


def sealed(size):
    memfd = os.memfd_create("qkvd-test", os.MFD_ALLOW_SEALING)
    os.truncate(memfd, size)
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return memfd


def cross(client, session, region, rows, write, read):
    k, v = rows(300)
    for at, array in ((0, k), (MIB, v)):
        write(at, array.tobytes())
    before = client.metrics()
    item = qkvd.Item(session=session.name, k=region.tensor(0, k.shape, "fp32"), v=region.tensor(MIB, v.shape, "fp32"))
    assert client.append([item]) == 300
    fetched = session.fetch(0)
    assert np.array_equal(fetched[0], k) and np.array_equal(fetched[1], v)
    tokens = memory.fetch_into(
        client, session.name, 0, k=region.part(2 * MIB, k.nbytes), v=region.part(3 * MIB, v.nbytes), dtype="fp32"
    )
    assert tokens == 300
    assert read(2 * MIB, k.nbytes) == k.tobytes() and read(3 * MIB, v.nbytes) == v.tobytes()
    assert memory.fetch_into(client, session.name, 0, v=region.part(0, v.nbytes), begin=7, end=9) == 2
    assert read(0, v[7:9].nbytes) == v[7:9].tobytes()
    after = client.metrics()
    name = "qkvd_client_shm_read_bytes_total"
    assert after[name] - before[name] == k.nbytes + v.nbytes


def test_a_memfd(client, daemon, session, rows):
    memfd = sealed(4 * MIB)
    token = memory.pass_descriptors(daemon.passing, [memfd])
    region = memory.register(client, session.name, 4 * MIB, descriptor=token)
    with pytest.raises(qkvd.NotFound, match="used once"):
        memory.register(client, "other", 4 * MIB, descriptor=token)
    cross(client, session, region, rows, lambda at, data: os.pwrite(memfd, data, at),
          lambda at, size: os.pread(memfd, size, at))  # fmt: skip
    memory.unregister(client, region)
    with pytest.raises(qkvd.NotFound):
        memory.unregister(client, region)
    os.close(memfd)


def test_an_object(client, session, rows):
    there = shared_memory.SharedMemory(create=True, size=4 * MIB)
    region = memory.register(client, session.name, 4 * MIB, key=there.name)

    def write(at, data):
        there.buf[at : at + len(data)] = data

    cross(client, session, region, rows, write, lambda at, size: bytes(there.buf[at : at + size]))
    memory.unregister(client, region)
    there.close()
    there.unlink()


def test_queries_strides_and_pieces(client, session, rows, random):
    there = shared_memory.SharedMemory(create=True, size=4 * MIB)
    region = memory.register(client, session.name, 4 * MIB, key=there.name)
    k, v = rows(64)
    heads_first = np.ascontiguousarray(k.transpose(1, 0, 2))
    there.buf[: k.nbytes] = heads_first.tobytes()
    there.buf[MIB : MIB + v.nbytes] = v.tobytes()
    turned = heads_first.transpose(1, 0, 2)
    placed = region.tensor(0, k.shape, "fp32", turned.strides)
    values = region.tensor(MIB, v.shape, "fp32")
    session.append(0, placed[:10], values[:10])
    session.append(0, placed[10:], values[10:])
    assert np.array_equal(session.fetch(0)[0], k)
    q = random.standard_normal((3, 4, 16), np.float32)
    there.buf[2 * MIB : 2 * MIB + q.nbytes] = q.tobytes()
    out, lse = session.attend(0, region.tensor(2 * MIB, q.shape, "fp32"))
    expected = session.attend(0, q)
    assert np.array_equal(out, expected[0]) and np.array_equal(lse, expected[1])
    memory.unregister(client, region)
    there.close()
    there.unlink()


def test_what_is_refused(client, daemon, session):
    region = memory.Region("r", 100, on_gpu=False)
    for offset, shape, strides in ((0, (2, 2, 16), ()), (-1, (1, 1, 1), ()), (97, (1, 1, 1), ()), (0, (1, 1, 1), (4,))):
        with pytest.raises(qkvd.InvalidArgument):
            region.tensor(offset, shape, "fp32", strides)
    with pytest.raises(qkvd.Unavailable, match="/no/such"):
        memory.pass_descriptors("/no/such/socket", [0])
    with pytest.raises(qkvd.InvalidArgument, match="no descriptor"):
        memory.pass_descriptors(daemon.passing, [])
    with pytest.raises(qkvd.InvalidArgument, match="raw_handle has 3 bytes"):
        memory.register_cuda(client, "r", 1, handle=b"abc")
    with pytest.raises(qkvd.FailedPrecondition, match="no GPU"):
        memory.register_cuda(client, "r", 1, handle=bytes(64))
    with pytest.raises(qkvd.InvalidArgument, match="k and v are None"):
        memory.fetch_into(client, session.name, 0)
