"""Clients that do harm: others are served while they do, health checks answer, and memory stays bounded."""

import itertools
import socket
import threading
import time

import grpc
import pytest

from daemon import PATIENCE, SANITIZED, Daemon, wait_for
from health.v1 import health_pb2, health_pb2_grpc
from http2 import DATA, END_HEADERS, END_STREAM, HEADERS, INITIAL_WINDOW_SIZE, PREFACE, SETTINGS, Raw, data, frame, head, request
from kv import TIMEOUT, Cache, Tenant
from qkv.v1 import admin_pb2, admin_pb2_grpc
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2
from reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from test_quotas import Admin

STREAMS = 2000
SOURCES = itertools.count(1)
MIB = 1 << 20


class Attack:
    """Connections that are closed at the end."""

    def __init__(self, daemon, count):
        # A peer's connections begin with the points that its earlier ones have left: each attack is another peer's.
        source = f"127.0.1.{next(SOURCES)}"
        self.connections = [Raw(daemon.tcp, source=source) for _ in range(count)]

    def __enter__(self):
        return self.connections

    def __exit__(self, *_):
        for connection in self.connections:
            connection.close()


@pytest.fixture(scope="module")
def strict():
    """A daemon on which silent calls stay: only the limits of calls help."""
    with Daemon("--limit-first-message", "0") as running:
        yield running


@pytest.fixture(scope="module")
def usual():
    with Daemon("--limit-first-message", "1s") as running:
        yield running


def check_health(daemon):
    answer = health_pb2_grpc.HealthStub(daemon.channel(daemon.tcp)).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def check_served(daemon):
    """Health, status and an ordinary call, each on a connection of its own."""
    check_health(daemon)
    status = daemon.status()
    daemon.stub(daemon.tcp).ListSessions(kv.ListSessionsRequest(), timeout=TIMEOUT)
    daemon.disconnect()
    return {metric.name: metric.value for metric in status.metrics}


def under_attack(daemon, running):
    """Waits until so many calls of the attack run, and is served meanwhile."""
    wait_for(lambda: check_served(daemon)["qkvd_calls_running"] >= running, f"{running} calls do not run")
    for _ in range(20):
        check_served(daemon)
    assert check_served(daemon)["qkvd_calls_running"] >= running - 64
    assert daemon.alive()


def wait_quiet(daemon):
    wait_for(lambda: check_served(daemon)["qkvd_calls_running"] <= 1, "calls of the attack are left")


@pytest.mark.parametrize("connections", [1, 100])
def test_silent_streams(strict, connections):
    before = strict.rss_bytes()
    with Attack(strict, connections) as attack:
        for connection in attack:
            connection.open(STREAMS // connections)
        under_attack(strict, 512 if connections == 1 else 1000)
        assert SANITIZED or strict.rss_bytes() < before + 128 * MIB
        if connections == 1:
            wait_for(lambda: b"limit-connection-calls is 512" in attack[0].received, "the refusal names no limit")
    wait_quiet(strict)


def test_silent_streams_lose_their_places_to_calls(strict):
    before = check_served(strict)["qkvd_calls_silent_total"]
    with Attack(strict, 4) as attack:
        for connection in attack:
            connection.open(500)
        under_attack(strict, 1000)
        assert check_served(strict)["qkvd_calls_silent_total"] > before
        wait_for(lambda: any(b"this call has sent no message" in connection.received for connection in attack),
                 "no call is told why it has ended")
    wait_quiet(strict)


def test_silent_health_checks(strict):
    """The places of control calls are taken by calls that say nothing: they go as others come."""
    with Attack(strict, 20) as attack:
        for connection in attack:
            connection.open(100, path="/grpc.health.v1.Health/Check")
        wait_for(lambda: check_served(strict)["qkvd_calls_running"] >= 32, "the calls do not run")
        for _ in range(20):
            check_served(strict)
        wait_for(lambda: any(b"limit-control-calls is 64" in connection.received for connection in attack),
                 "the refusal names no limit")
    wait_quiet(strict)


def test_health_checks_whose_answers_are_not_read(strict):
    """They need no credentials, and take all places of control calls: these go as others come."""
    check = "/grpc.health.v1.Health/Check"
    before = check_served(strict)["qkvd_calls_stalled_total"]
    with Attack(strict, 20) as attack:
        for connection in attack:
            connection.greet((INITIAL_WINDOW_SIZE, 0))
            for stream in range(1, 41, 2):
                connection.send(frame(HEADERS, END_HEADERS, stream, request(check)) + data(stream, head(0), END_STREAM))
        wait_for(lambda: any(b"64 and so many calls are running" in connection.received for connection in attack),
                 "the places are not all taken")
        for _ in range(20):
            check_served(strict)
        wait_for(lambda: any(b"the answer to this call has not been read" in connection.received for connection in attack),
                 "no call is told why it has ended")
    assert check_served(strict)["qkvd_calls_stalled_total"] > before
    wait_quiet(strict)


def test_connections_of_one_peer():
    """One address gets half of all connections; others are served, and it is again when its connections are gone."""
    with Daemon("--limit-connections", "40") as daemon:
        host, port = daemon.tcp.rsplit(":", 1)

        def metric(name):
            value = daemon.metric("qkvd_connections" if name == "open" else f"qkvd_connections_{name}")
            daemon.disconnect()
            return value

        held = [socket.create_connection((host, int(port)), timeout=PATIENCE) for _ in range(100)]
        wait_for(lambda: metric("refused_total") == 80, "not all others are refused")
        wait_for(lambda: metric("open") == 21, "half of all connections and the one that asks are not open")
        for connection in held:
            connection.close()
        wait_for(lambda: metric("open") == 1, "connections are not counted as gone")
        check_served(daemon)
        assert [line["limit"] for line in daemon.log_lines() if "limit" in line] == ["limit-peer-connections"]


@pytest.mark.parametrize("payload", [None, b"\0\0\1\0\0", b"\0\0\3\xff\xff" + bytes(1000)],
                         ids=["nothing", "a head", "a part"])
def test_first_message_that_does_not_come(usual, payload):
    """Half a message is none; the limit is named."""
    with Attack(usual, 2) as attack:
        for connection in attack:
            connection.open(20, payload=payload)
        for connection in attack:
            wait_for(lambda: connection.received.count(b"limit-first-message is 1000 ms") >= 1 or
                     connection.closed, "the calls are not ended")
            assert not connection.closed
    wait_quiet(usual)


def test_stream_that_has_spoken_may_pause(usual):
    """The deadline is for the first message alone."""
    def requests():
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        time.sleep(2.5)
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    stub = reflection_pb2_grpc.ServerReflectionStub(usual.channel(usual.tcp))
    assert len(list(stub.ServerReflectionInfo(requests(), timeout=TIMEOUT))) == 2
    usual.disconnect()


@pytest.mark.parametrize("data", [
    b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(200), bytes(range(256)) * 64, PREFACE + b"\xff" * 4096,
    PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, b"\xff" * 100),
    PREFACE + frame(SETTINGS, 0, 0) + frame(DATA, 0, 1, b"x" * 100)], ids=range(6))
def test_garbage(usual, data):
    with Attack(usual, 20) as attack:
        for connection in attack:
            connection.send(data)
        check_served(usual)
    wait_quiet(usual)


def test_connections_that_say_nothing(usual):
    before = usual.rss_bytes()
    with Attack(usual, 200) as attack:
        for connection in attack[::2]:
            connection.send(PREFACE[:10])
        check_served(usual)
        assert SANITIZED or usual.rss_bytes() < before + 64 * MIB
    wait_quiet(usual)


def test_calls_of_a_tenant():
    """A tenant's calls are limited over its connections, and another tenant is served."""
    with Daemon("--limit-tenant-calls", "3", "--limit-first-message", "0") as daemon:
        release = threading.Event()

        def silent():
            release.wait(PATIENCE)
            return
            yield

        greedy, modest = (("qkv-tenant", "greedy"),), (("qkv-tenant", "modest"),)
        held = [daemon.stub(daemon.tcp).Append.future(silent(), metadata=greedy) for _ in range(3)]
        wait_for(lambda: daemon.metric("qkvd_calls_running") >= 4, "the calls do not run")
        with pytest.raises(grpc.RpcError) as refusal:
            daemon.stub(daemon.tcp).ListModels(model_pb2.ListModelsRequest(), metadata=greedy, timeout=TIMEOUT)
        assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refusal.value.details() == "limit-tenant-calls is 3 and so many calls of this tenant are running"
        daemon.stub(daemon.tcp).ListSessions(kv.ListSessionsRequest(), metadata=modest, timeout=TIMEOUT)
        for call in held:
            call.cancel()
        release.set()


def test_a_tenant_that_sends_ten_times_its_rate(tmp_path):
    """It gets its rate, and is refused the rest; no call of another tenant fails."""
    rate, rows, streams = 100, 40, 4
    with Daemon("--data-dir", str(tmp_path)) as daemon:
        admin = Admin(daemon)
        admin.set("a", rows_per_second=rate)
        caches = [Cache(Tenant(daemon.stub(daemon.tcp), "a"), f"s{i}", layers=1) for i in range(streams)]
        other = Cache(Tenant(daemon.stub(daemon.tcp), "b"), "other", layers=1)
        offered, refusals, stop = [0] * streams, [0] * streams, threading.Event()

        def flood(number):
            cache, position = caches[number], 0
            while not stop.is_set():
                offered[number] += rows
                try:
                    cache.append(position, *cache.rows(rows))
                    position += rows
                except grpc.RpcError as error:
                    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, error.details()
                    assert "quota rows_per_second of tenant a is 100" in error.details()
                    refusals[number] += 1

        began = time.monotonic()
        threads = [threading.Thread(target=flood, args=(i,)) for i in range(streams)]
        for thread in threads:
            thread.start()
        asked = 0
        while time.monotonic() < began + 3 or sum(offered) < 10 * rate * (time.monotonic() - began):
            assert all(thread.is_alive() for thread in threads) and time.monotonic() < began + PATIENCE, offered
            other.append(asked, *other.rows(1))
            asked += 1
        stop.set()
        for thread in threads:
            thread.join()
        took, used = time.monotonic() - began, admin.usage("a")
        # A second's worth at once, and what may pass as the last of a debt is paid.
        assert rate * took / 4 <= used.rows <= rate * (took + 1) + streams * rows, (used.rows, took)
        assert used.refused >= sum(refusals) > 0 and admin.usage("b").refused == 0


def test_a_tenant_leaves_places_to_others():
    """Streams that have been answered and go on hold their places: those of one tenant are three quarters of all, and the
    next ones get three quarters of the rest."""
    with Daemon("--limit-calls", "16") as daemon:
        def hold(tenant, count):
            cache = Cache(Tenant(daemon.stub(), tenant), f"of-{tenant}", layers=1)
            cache.append(0, *cache.rows(1))
            sent = kv.AttendRequest(items=[cache.item(0, q=cache.queries(1))]).SerializeToString()
            raw = Raw(daemon.tcp)
            raw.greet()
            for stream in range(1, 2 * count, 2):
                raw.send(frame(HEADERS, END_HEADERS, stream, request("/qkv.v1.KvCache/Decode", ("qkv-tenant", tenant))) +
                         data(stream, head(len(sent)) + sent))
            return raw

        def running():
            value = daemon.metric("qkvd_calls_running") - 1
            daemon.disconnect()
            return value

        held = [hold("greedy", 20)]
        wait_for(lambda: b"limit-calls is 16 and this tenant has 12 of 12: what is left is for others" in held[0].received,
                 "nothing is refused")
        wait_for(lambda: running() == 12, "others than those run")
        held.append(hold("second", 20))
        wait_for(lambda: b"this tenant has 3 of 15" in held[1].received, "nothing is refused")
        wait_for(lambda: running() == 15, "others than those run")
        daemon.stub(daemon.tcp).ListSessions(kv.ListSessionsRequest(), metadata=(("qkv-tenant", "third"),), timeout=TIMEOUT)
        for raw in held:
            raw.close()
        wait_for(lambda: running() == 0, "the places are not free again")
    with Daemon("--limit-calls", "16", "--limit-tenant-calls", "16") as daemon:
        held = [hold("greedy", 16)]
        wait_for(lambda: running() == 16, "the calls do not run")
        held[0].close()


def test_admin_calls_have_places_of_their_own(tmp_path):
    """A daemon whose places are all taken by calls that go on is managed, and drained."""
    (tmp_path / "quotas").touch()
    with Daemon("--limit-calls", "2", "--limit-tenant-calls", "3", "--quota-file", str(tmp_path / "quotas")) as daemon:
        cache, ended = Cache(daemon.stub(), "s"), threading.Event()
        rows = cache.rows(1)

        def requests():
            yield kv.AppendRequest(items=[cache.item(0, *rows)])
            ended.wait(PATIENCE)

        held = [daemon.stub().Append.future(requests(), timeout=TIMEOUT) for _ in range(2)]
        wait_for(lambda: daemon.metric("qkvd_append_items_total") == 2, "the calls do not run")
        with pytest.raises(grpc.RpcError) as refusal:
            cache.info()
        assert refusal.value.details() == "limit-calls is 2 and so many calls are running"
        admin = admin_pb2_grpc.AdminStub(daemon.channel())
        admin.SetQuota(admin_pb2.SetQuotaRequest(quota=admin_pb2.Quota(tenant="a", calls=1)), timeout=TIMEOUT)
        assert admin.GetQuota(admin_pb2.GetQuotaRequest(tenant="a"), timeout=TIMEOUT).tenants[0].quota.calls == 1
        drained = admin.Drain.future(admin_pb2.DrainRequest(), timeout=TIMEOUT)
        ended.set()
        for call in held:
            call.cancel()
        drained.result()
        assert daemon.wait() == 0


def test_health_answers_soon(strict):
    """Not a bound on time, which a busy machine breaks, but on what comes between: the attack costs no order of magnitude."""
    def median():
        times = []
        channel = strict.channel(strict.tcp)
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(51):
            begin = time.monotonic()
            stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
            times.append(time.monotonic() - begin)
        return sorted(times)[25]

    quiet = median()
    with Attack(strict, 10) as attack:
        for connection in attack:
            connection.open(200)
        under_attack(strict, 1000)
        busy = median()
    print(f"health check p50: {quiet * 1e3:.2f} ms quiet, {busy * 1e3:.2f} ms under attack")
    assert busy < quiet * 100 + 1
    strict.disconnect()
    wait_quiet(strict)
