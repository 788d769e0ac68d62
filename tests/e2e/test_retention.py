"""Retention EVICT: the longest unused sessions are closed where memory, places or the SSD are full."""

import subprocess
import time

import grpc
import pytest

from daemon import Daemon, binary
from kv import TIMEOUT, Cache, Tenant, refused
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import objects_pb2, objects_pb2_grpc

EVICT = kv.RETENTION_EVICT


def open_session(stub, cache, name, **fields):
    fields.setdefault("retention", EVICT)
    return stub.OpenSession(kv.OpenSessionRequest(session=name, model=cache.model.name, **fields), timeout=TIMEOUT).info


def is_open(stub, names):
    return [p != 0 for p in stub.HasSessions(kv.HasSessionsRequest(sessions=names), timeout=TIMEOUT).presence]


def fill(cache, name, tokens=512, position=0, rows=None):
    before, cache.name = cache.name, name
    try:
        cache.append(position, *(rows or cache.rows(tokens)))
    finally:
        cache.name = before


def test_the_daemons_default():
    """`--retention evict` is of sessions and objects that do not say; those that say KEEP stay."""
    with Daemon("--retention", "evict") as daemon:
        stub = daemon.stub()
        cache = Cache(stub, "default", layers=1, kv_heads=2, key_dim=64, value_dim=64)
        said = {"silent": kv.RETENTION_UNSPECIFIED, "keep": kv.RETENTION_KEEP, "evict": EVICT}
        got = {name: open_session(stub, cache, name, retention=retention).retention for name, retention in said.items()}
        assert got == {"silent": EVICT, "keep": kv.RETENTION_KEEP, "evict": EVICT}
        objects = objects_pb2_grpc.ObjectsStub(daemon.channel())
        for name, retention in said.items():
            begin = objects_pb2.ObjectInfo(object=name, bytes=1, retention=retention)
            piece = objects_pb2.PutPiece(begin=begin, data=b"x")
            objects.PutObjects(iter([objects_pb2.PutObjectsRequest(pieces=[piece])]), timeout=TIMEOUT)
        listed = objects.ListObjects(objects_pb2.ListObjectsRequest(), timeout=TIMEOUT).objects
        assert {info.object: info.retention for info in listed} == got
    refused_start = subprocess.run([binary("qkvd"), "--retention", "forget"], capture_output=True, text=True, check=False)
    assert refused_start.returncode and "--retention is forget, known are keep and evict" in refused_start.stderr


def test_memory_is_made_by_the_longest_unused(tmp_path):
    with Daemon("--memory-budget", "16MiB", "--threads", "1", "--calibrate-tokens", "0") as daemon:
        stub = daemon.stub()
        cache = Cache(stub, "keeper", layers=1, kv_heads=2, key_dim=64, value_dim=64)
        rows = cache.rows(512)
        fill(cache, "keeper", rows=rows)
        names = [f"chunk-{i}" for i in range(400)]
        for i, name in enumerate(names):
            assert open_session(stub, cache, name).retention == EVICT
            fill(cache, name, rows=rows)
            if i > 0:
                stub.Touch(kv.TouchRequest(session=names[0]), timeout=TIMEOUT)  # this one is used all the time
        held = is_open(stub, names)
        # The first one was used, the last ones are there without a gap, those between are gone.
        first = held.index(True, 1)
        assert held[0] and all(held[first:]) and 50 < first < 399
        assert is_open(stub, ["keeper"]) == [True]
        assert daemon.metric("qkvd_sessions_evicted_total") == first - 1
        assert len(cache.fetch()[0]) == 512
        # Nothing that may go is left: refused, and nothing has changed.
        for name in names:
            if is_open(stub, [name])[0]:
                stub.CloseSession(kv.CloseSessionRequest(session=name), timeout=TIMEOUT)
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "memory-budget"):
            for position in range(512, 1 << 20, 4096):
                fill(cache, "keeper", 4096, position)
        assert is_open(stub, ["keeper"]) == [True]


def test_pinned_sessions_and_others_stay():
    with Daemon("--memory-budget", "12MiB", "--threads", "1", "--calibrate-tokens", "0") as daemon:
        stub = daemon.stub()
        cache = Cache(stub, "keeper", layers=1, kv_heads=2, key_dim=64, value_dim=64)
        rows = cache.rows(512)
        fill(cache, "keeper", rows=rows)
        open_session(stub, cache, "pinned")
        fill(cache, "pinned", rows=rows)
        stub.Pin(kv.PinRequest(session="pinned"), timeout=TIMEOUT)
        for i in range(200):
            open_session(stub, cache, f"chunk-{i}")
            fill(cache, f"chunk-{i}", rows=rows)
        assert is_open(stub, ["keeper", "pinned", "chunk-0", "chunk-199"]) == [True, True, False, True]
        # A session that is alone with what may not go is not closed for its own append.
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "memory-budget"):
            for position in range(512, 1 << 20, 4096):
                fill(cache, "chunk-199", 4096, position)
        assert is_open(stub, ["chunk-199"]) == [True]


def test_places_are_made_too():
    with Daemon("--limit-sessions", "20") as daemon:
        stub = daemon.stub()
        cache = Cache(stub, "keeper", layers=1)
        for i in range(100):
            open_session(stub, cache, f"chunk-{i}")
        assert is_open(stub, ["keeper", "chunk-0", "chunk-99"]) == [True, False, True]
        # For a session that is to stay, too, and for a fork.
        open_session(stub, cache, "another", retention=kv.RETENTION_KEEP)
        cache.append(0, *cache.rows(5))
        stub.Fork(kv.ForkRequest(session="keeper", fork="fork"), timeout=TIMEOUT)
        assert is_open(stub, ["keeper", "another", "fork"]) == [True] * 3
        assert len(list(stub.ListSessions(kv.ListSessionsRequest(), timeout=TIMEOUT).sessions)) == 20
        for i in range(18):
            stub.CloseSession(kv.CloseSessionRequest(session="fork"), timeout=TIMEOUT) if i == 0 else None
        for i in range(40):
            if i < 17:
                open_session(stub, cache, f"keep-{i}", retention=kv.RETENTION_KEEP)
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "limit-sessions is 20, all are in use"):
            for i in range(17, 40):
                open_session(stub, cache, f"keep-{i}", retention=kv.RETENTION_KEEP)
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "retention is 3, known are 1 (keep) and 2 (evict)"):
            open_session(stub, cache, "x", retention=3)


def test_a_tenant_without_chunks_walks_over_no_others(tmp_path):
    """At its quota it is refused without a look at sessions of others: evictions wait for each other."""
    quotas = tmp_path / "quotas"
    quotas.write_text("small sessions=2\n")
    with Daemon("--memory-budget", "2GiB", "--quota-file", str(quotas)) as daemon:
        small = Tenant(daemon.stub(), "small")
        cache = Cache(small, "keeper", layers=1)
        open_session(small, cache, "pinned", retention=EVICT)
        small.Pin(kv.PinRequest(session="pinned"), timeout=TIMEOUT)

        def shortest():
            times = []
            for _ in range(50):
                begin = time.perf_counter()
                with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "quota sessions of tenant small is 2"):
                    open_session(small, cache, "more", retention=EVICT)
                times.append(time.perf_counter() - begin)
            return min(times)

        alone = shortest()
        stub = daemon.stub()
        chunk = Cache(stub, "first", layers=1).model.name
        for first in range(0, 30000, 200):
            opening = [stub.OpenSession.future(kv.OpenSessionRequest(session=f"s{i}", model=chunk, retention=EVICT))
                       for i in range(first, first + 200)]
            for call in opening:
                call.result()
        assert any(shortest() < 3 * alone for _ in range(5))
        small.Pin(kv.PinRequest(session="pinned", unpin=True), timeout=TIMEOUT)
        open_session(small, cache, "more", retention=EVICT)  # which closes it
        with refused(grpc.StatusCode.NOT_FOUND, "no session pinned"):
            small.GetSession(kv.GetSessionRequest(session="pinned"), timeout=TIMEOUT)


def test_the_ssd_gives_up_chunks_first_and_remembers_them(tmp_path):
    options = ["--data-dir", str(tmp_path), "--memory-budget", "64MiB", "--storage-budget", "24MiB",
               "--storage-segment", "4MiB"]
    with Daemon(*options) as daemon:
        stub = daemon.stub()
        cache = Cache(stub, "keeper", layers=1, kv_heads=2, key_dim=64, value_dim=64,
                      durability=kv.DURABILITY_ASYNC, recent_window=0)
        rows = cache.rows(1024)
        fill(cache, "keeper", rows=rows)
        deadline = time.monotonic() + TIMEOUT
        i = 0
        while daemon.metric("qkvd_storage_expelled_sessions_total") == 0:
            assert time.monotonic() < deadline
            open_session(stub, cache, f"chunk-{i}", durability=kv.DURABILITY_ASYNC)
            fill(cache, f"chunk-{i}", rows=rows)
            i += 1
            time.sleep(0.01)
        assert is_open(stub, ["keeper", f"chunk-{i - 1}"]) == [True, True]
        assert not all(is_open(stub, [f"chunk-{j}" for j in range(i)]))
    with Daemon(*options) as daemon:
        infos = {info.session: info for info in daemon.stub().ListSessions(kv.ListSessionsRequest(), timeout=TIMEOUT).sessions}
        assert infos["keeper"].retention == kv.RETENTION_KEEP
        assert {info.retention for name, info in infos.items() if name != "keeper"} == {EVICT}


@pytest.mark.parametrize("data", [False, True])
def test_thousands_of_chunks(tmp_path, data):
    """Nothing that takes as long as there are sessions is done for each append."""
    with Daemon("--memory-budget", "8MiB", "--calibrate-tokens", "0", *(["--data-dir", str(tmp_path)] if data else [])) as daemon:
        stub = daemon.stub()
        cache = Cache(stub, "keeper", layers=1, durability=kv.DURABILITY_MEMORY)
        rows = cache.rows(1)
        begin = time.monotonic()
        for i in range(6000):
            stub.OpenSession(kv.OpenSessionRequest(session=f"chunk-{i}", model=cache.model.name, retention=EVICT,
                                                   durability=kv.DURABILITY_MEMORY), timeout=TIMEOUT)
            if i % 10 == 0:
                fill(cache, f"chunk-{i}", rows=rows)
            if time.monotonic() - begin > 60:
                break
        assert is_open(stub, ["keeper", f"chunk-{i}"]) == [True, True]
        assert i == 5999 or daemon.metric("qkvd_sessions_evicted_total") > 0
