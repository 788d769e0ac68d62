"""Admin.Drain and qkvctl drain: not ready first, running calls end, sessions are on the SSD, exit 0."""

import subprocess
import threading
import time

import grpc
import pytest

from daemon import PATIENCE, Daemon, binary, wait_for
from health.v1 import health_pb2, health_pb2_grpc
from kv import TIMEOUT, Cache, refused
from qkv.v1 import admin_pb2, admin_pb2_grpc
from qkv.v1 import kv_cache_pb2 as kv

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def admin(daemon):
    return admin_pb2_grpc.AdminStub(daemon.channel())


def health(daemon):
    stub = health_pb2_grpc.HealthStub(daemon.channel())
    return stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE).status


def test_a_drain_keeps_what_is_to_survive(tmp_path):
    data = ("--data-dir", str(tmp_path / "data"))
    with Daemon(*data) as daemon:
        cache = Cache(daemon.stub(), "kept")
        rows = cache.rows(100)
        cache.append(0, *rows)
        admin(daemon).Drain(admin_pb2.DrainRequest(), timeout=TIMEOUT)
        assert daemon.wait() == 0
    with Daemon(*data) as daemon:
        cache.stub = daemon.stub()
        assert cache.info().lengths[0] == 100


def test_notice_comes_before_calls_are_refused():
    with Daemon("--drain-grace", "10m") as daemon:
        cache = Cache(daemon.stub(), "session")
        go_on = threading.Event()

        def requests():
            yield kv.AttendRequest(items=[cache.item(0, *cache.rows(5))])
            go_on.wait(TIMEOUT)
            yield kv.AttendRequest(items=[cache.item(5, *cache.rows(5))])

        answers = cache.stub.Decode(requests(), timeout=TIMEOUT)
        next(answers)
        began = time.monotonic()
        admin(daemon).Drain(admin_pb2.DrainRequest(notice_ms=3000), timeout=TIMEOUT)
        wait_for(lambda: health(daemon) == NOT_SERVING, "it does not say that it is not ready")
        cache.info()  # a new call is served
        assert time.monotonic() - began < 3
        with pytest.raises(grpc.RpcError) as caught:
            while True:
                cache.info()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began >= 2.9
        daemon.terminate()  # as Kubernetes does next: it is drained already
        time.sleep(0.2)
        assert daemon.alive()
        go_on.set()
        assert next(answers).results[0].length == 10
        assert daemon.wait() == 0


def test_times_have_limits(daemon):
    for fields, text in (({"grace_ms": 3600001}, "grace_ms is 3600001, at most 3600000"),
                         ({"notice_ms": 600001}, "notice_ms is 600001, at most 600000")):
        with refused(grpc.StatusCode.INVALID_ARGUMENT, text):
            admin(daemon).Drain(admin_pb2.DrainRequest(**fields), timeout=TIMEOUT)
    assert daemon.alive()


def test_qkvctl_waits_for_the_end():
    with Daemon() as daemon:
        command = [binary("qkvctl"), "drain", "--wait", "--notice", "300ms", "--target", f"unix:{daemon.socket}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert (done.returncode, done.stdout) == (0, "the daemon has ended\n"), done.stderr
        assert daemon.wait() == 0
