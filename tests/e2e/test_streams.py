"""Deadlines, cancelling, clients that die or never read, a full budget, draining."""

import os
import signal
import subprocess
import sys
import threading
import time

import grpc
import numpy as np
import pytest

from daemon import PATIENCE, SANITIZED, Daemon, clean_environment, wait_for
from kv import TIMEOUT, Cache, refused
from qkv.v1 import kv_cache_pb2 as kv


def settled(daemon):
    """Waits until no call is running but the one that asks."""
    wait_for(lambda: daemon.metric("qkvd_calls_running") <= 1, "calls are left running")


@pytest.fixture
def large(make_cache):
    cache = make_cache(kv_heads=4, q_heads=32, key_dim=128, value_dim=128, recent_window=0)
    cache.append(0, *cache.rows(1024))
    return cache


def test_a_large_attend_is_cut_short():
    """One that would take minutes: others are served meanwhile, its end by deadline and by its client is soon."""
    with Daemon("--cpu-mask", "none", "--threads", "1") as daemon:
        cache = Cache(daemon.stub(), "large", layers=1, kv_heads=4, q_heads=32, key_dim=128, value_dim=128,
                      recent_window=0)
        k, v = cache.rows(1024)
        for position in range(0, 8192, 1024):
            cache.append(position, k, v)
        large = [cache.item(8191, q=cache.queries(32))] * 64
        request = kv.AttendRequest(items=[cache.item(8192, *cache.rows(1))] + large)
        call = cache.stub.Attend.future(request, timeout=TIMEOUT)
        wait_for(lambda: cache.info().lengths[0] == 8193, "the call has not begun")
        for _ in range(5):
            daemon.status()
        assert not call.done()
        call.cancel()
        assert call.cancelled()
        wait_for(lambda: daemon.metric("qkvd_calls_cancelled_total") == 1, "the call goes on")
        with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
            cache.stub.Attend(kv.AttendRequest(items=large), timeout=2)
        wait_for(lambda: daemon.metric("qkvd_calls_cancelled_total") == 2, "the call goes on")
        settled(daemon)


def test_fetch_that_is_cancelled(daemon, large):
    call = large.stub.Fetch(kv.FetchRequest(session=large.name, chunk_tokens=64), timeout=TIMEOUT)
    next(call)
    call.cancel()
    settled(daemon)


@pytest.fixture
def long(make_cache):
    """A session of more bytes than a connection buffers: 32 MiB, exact."""
    cache = make_cache(kv_heads=4, q_heads=32, key_dim=128, value_dim=128, recent_window=100000)
    k, v = cache.rows(1024)
    for position in range(0, 8192, 1024):
        cache.append(position, k, v)
    return cache


def test_fetch_that_nobody_reads(daemon, long):
    """The daemon holds what one response takes, not the whole session; others are served meanwhile."""
    before = daemon.rss_bytes()
    calls = [daemon.stub(daemon.tcp).Fetch(kv.FetchRequest(session=long.name, layers=[0], dtype=1), timeout=TIMEOUT)
             for _ in range(4)]
    for call in calls:
        next(call)
    time.sleep(1)
    if not SANITIZED:
        assert daemon.rss_bytes() - before < 32 << 20
    assert daemon.metric("qkvd_calls_running") >= 5
    long.append(8192, *long.rows(3))
    assert long.attend(8194, long.queries(1))[0].shape == (1, 32, 128)
    for call in calls:
        call.cancel()
    settled(daemon)


def test_fetch_deadline_while_nobody_reads(daemon, long):
    call = long.stub.Fetch(kv.FetchRequest(session=long.name, layers=[0], dtype=1), timeout=10)
    next(call)
    time.sleep(10.5)
    with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
        list(call)
    settled(daemon)


CLIENT_THAT_HANGS = """
import sys, time
import numpy as np
from daemon import *
from kv import *

target, name, method = sys.argv[1:4]
stub = kv_cache_pb2_grpc.KvCacheStub(grpc.insecure_channel(target))
rows = np.ones((10, 2, 16), np.float32)

def requests():
    for index in range(5):
        item = kv.Item(session=name, position=10 * index, k=tensor(rows), v=tensor(rows))
        yield (kv.AppendRequest if method == "Append" else kv.AttendRequest)(items=[item])
        time.sleep(0.02)
    print("sent", flush=True)
    time.sleep(1000)

answer = getattr(stub, method)(requests())
if method == "Decode":
    list(answer)
"""


@pytest.mark.parametrize("method", ["Append", "Decode"])
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_client_that_dies_in_its_stream(daemon, make_cache, method, signal_number):
    cache = make_cache(recent_window=1000)
    environment = clean_environment(QKV_BIN_DIR="", PYTHONPATH=":".join(sys.path))
    client = subprocess.Popen([sys.executable, "-c", CLIENT_THAT_HANGS, daemon.target, cache.name, method],
                              stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert client.stdout.readline() == "sent\n"
        wait_for(lambda: cache.info().lengths[0] >= 50, "what was sent has not arrived")
    finally:
        client.send_signal(signal_number)
        client.wait()
        client.stdout.close()
    settled(daemon)
    assert cache.info().lengths[0] == 50
    cache.append(50, *cache.rows(3))
    assert np.array_equal(cache.fetch()[0][:50], np.ones((50, 2, 16), np.float32))


def test_session_closed_under_a_running_stream(daemon, make_cache):
    cache = make_cache(recent_window=0)
    cache.append(0, *cache.rows(100))
    opened = threading.Event()

    def requests():
        yield kv.AttendRequest(items=[cache.item(99, q=cache.queries(1))])
        opened.wait(TIMEOUT)
        yield kv.AttendRequest(items=[cache.item(99, q=cache.queries(1))])

    answers = cache.stub.Decode(requests(), timeout=TIMEOUT)
    assert next(answers).results[0].status.code == 0
    cache.stub.CloseSession(kv.CloseSessionRequest(session=cache.name), timeout=TIMEOUT)
    opened.set()
    assert next(answers).results[0].status.code == grpc.StatusCode.NOT_FOUND.value[0]


def test_appends_from_many_clients(daemon, make_cache):
    """Each client has a session; another one attends and lists meanwhile."""
    caches = [make_cache(seed=seed, recent_window=8) for seed in range(6)]
    failures = []

    def client(cache):
        try:
            own = daemon.stub()
            k, v = cache.rows(200)
            for position in range(0, 200, 5):
                item = cache.item(position, k[position:position + 5], v[position:position + 5],
                                  q=cache.queries(1))
                result = own.Attend(kv.AttendRequest(items=[item]), timeout=TIMEOUT).results[0]
                assert result.length == position + 5
        except Exception as error:  # noqa: reported by the test below
            failures.append(error)

    threads = [threading.Thread(target=client, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(cache.info().lengths[0] == 200 for cache in caches)


def test_full_budget_refuses_whole_appends_and_recovers():
    with Daemon("--memory-budget", "1MiB") as daemon:
        cache = Cache(daemon.stub(), "first", recent_window=0)
        other = Cache(cache.stub, "other", recent_window=0)
        for used in (cache, other):  # what a session takes in addition to its rows it gets with its first use
            used.append(0, *used.rows(1))
            used.stub.Truncate(kv.TruncateRequest(session=used.name, position=0), timeout=TIMEOUT)
        empty = daemon.status().kv_bytes  # of two sessions of the same model
        k, v = cache.rows(100)
        position = 0
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "memory-budget", "1048576"):
            while True:
                cache.append(position, k, v)
                position += 100
                assert position < 1000000
        assert cache.info().lengths[0] == position
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "memory-budget"):
            other.append(0, *other.rows(1000))
        assert other.info().lengths[0] == 0
        # What is held is still served.
        assert cache.fetch()[0].shape[0] == position
        cache.attend(position - 1, cache.queries(1))
        status = daemon.status()
        assert 0 < status.kv_bytes <= status.kv_bytes_limit == 1 << 20
        assert daemon.metric("qkvd_refused_budget_total") >= 2
        cache.stub.CloseSession(kv.CloseSessionRequest(session="first"), timeout=TIMEOUT)
        # A session that is being demoted at the moment is freed when that is done.
        wait_for(lambda: daemon.status().kv_bytes == empty / 2, "the memory is not given back")
        other.append(0, *other.rows(1000))
        assert other.info().lengths[0] == 1000


def is_refused(cache):
    try:
        cache.info()
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        return True
    return False


def test_drain_lets_a_running_stream_finish():
    with Daemon("--drain-grace", "10m") as daemon:
        cache = Cache(daemon.stub(), "session")
        k, v = cache.rows(10)
        go_on = threading.Event()

        def requests():
            yield kv.AttendRequest(items=[cache.item(0, k[:5], v[:5])])
            go_on.wait(TIMEOUT)
            yield kv.AttendRequest(items=[cache.item(5, k[5:], v[5:])])

        answers = cache.stub.Decode(requests(), timeout=TIMEOUT)
        assert next(answers).results[0].length == 5
        daemon.terminate()
        # New calls are refused, on this connection and on new ones.
        wait_for(lambda: is_refused(cache), "no drain has begun")
        assert daemon.alive()
        with refused(grpc.StatusCode.UNAVAILABLE):
            daemon.stub().GetSession(kv.GetSessionRequest(session="session"), timeout=PATIENCE)
        go_on.set()
        assert next(answers).results[0].length == 10
        assert list(answers) == []
        assert daemon.wait() == 0


def test_drain_ends_within_its_bound():
    with Daemon("--drain-grace", "500ms") as daemon:
        cache = Cache(daemon.stub(), "session")
        never = threading.Event()

        def requests():
            yield kv.AttendRequest(items=[cache.item(0, q=cache.queries(1))])
            never.wait(TIMEOUT)

        answers = cache.stub.Decode(requests(), timeout=TIMEOUT)
        next(answers)
        begin = time.monotonic()
        daemon.terminate()
        with pytest.raises(grpc.RpcError) as caught:
            list(answers)
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert daemon.wait() == 0
        assert time.monotonic() - begin > 0.4
        never.set()


def test_idle_clients_do_not_hold_up_the_end():
    with Daemon("--drain-grace", "10m") as daemon:
        for _ in range(5):
            daemon.stub().ListSessions(kv.ListSessionsRequest(), timeout=TIMEOUT)
        daemon.terminate()
        assert daemon.wait() == 0


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_daemon_cleanly(signal_number):
    with Daemon() as daemon:
        daemon.process.send_signal(signal_number)
        assert daemon.wait() == 0


def test_start_after_a_kill_takes_the_socket_over():
    with Daemon() as daemon:
        daemon.kill()
        path = daemon.socket
        with Daemon("--listen", f"unix:{path}", listen=False) as second:
            stub = second.stub(f"unix:{path}")
            stub.ListSessions(kv.ListSessionsRequest(), timeout=TIMEOUT)
        assert not os.path.exists(path)
