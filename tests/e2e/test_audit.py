"""The audit log, slow calls, and what logs say of a call."""

import json
import os
import signal
import time

import grpc
import pytest

from daemon import Daemon, wait_for
from kv import TIMEOUT, Cache, Tenant, refused
from qkv.v1 import admin_pb2, admin_pb2_grpc
from qkv.v1 import kv_cache_pb2 as kv
from test_identity import bearer, new_token

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOBODY = "sha256:" + "0" * 64


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_admin_calls_and_refusals(tmp_path):
    path, auth = tmp_path / "audit", tmp_path / "auth"
    auth.write_text(f"token {NOBODY} team-a read\n")
    with Daemon("--audit-log", str(path), "--auth-file", str(auth), "--allow-anonymous", "unix") as daemon:
        stub = admin_pb2_grpc.AdminStub(daemon.channel())
        stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=TIMEOUT)
        stub.GetQuota(admin_pb2.GetQuotaRequest(), timeout=TIMEOUT, metadata=[("traceparent", TRACE)])
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "neither a quota-file"):
            stub.SetQuota(admin_pb2.SetQuotaRequest(quota=admin_pb2.Quota(tenant="a", calls=1)), timeout=TIMEOUT)
        daemon.stub().ListSessions(kv.ListSessionsRequest(), timeout=TIMEOUT)  # no admin's
        secret = [("authorization", "Bearer some-secret-token"), ("qkv-tenant", "team-a"), ("traceparent", "<script>")]
        with refused(grpc.StatusCode.UNAUTHENTICATED, "not known"):
            daemon.stub().ListSessions(kv.ListSessionsRequest(), timeout=TIMEOUT, metadata=secret)
        got, failed, denied = lines(path)
        assert (got["event"], got["method"], got["status"]) == ("admin", "/qkv.v1.Admin/GetQuota", "OK")
        assert got["traceparent"] == TRACE and got["call"] > 0 and f"process {os.getpid()}" in got["peer"]
        assert (failed["event"], failed["status"]) == ("admin", "FAILED_PRECONDITION")
        assert "neither a quota-file" in failed["reason"]
        assert (denied["event"], denied["status"], denied["tenant"]) == ("refused", "UNAUTHENTICATED", "team-a")
        assert denied["method"] == "/qkv.v1.KvCache/ListSessions" and "traceparent" not in denied and "call" not in denied
        assert "secret" not in path.read_text()
        assert path.stat().st_mode & 0o777 == 0o600

        moved = tmp_path / "moved"
        path.rename(moved)
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(path.exists, "the file is not opened again")
        stub.GetQuota(admin_pb2.GetQuotaRequest(), timeout=TIMEOUT)
        assert len(lines(path)) == 1 and len(lines(moved)) == 3

        stubs = daemon.stub()
        for _ in range(400):  # one client cannot fill the disk
            with pytest.raises(grpc.RpcError):
                stubs.ListSessions(kv.ListSessionsRequest(), timeout=TIMEOUT, metadata=secret[:1])
        stub.GetQuota(admin_pb2.GetQuotaRequest(), timeout=TIMEOUT)
        after = lines(path)
        skipped = sum(line.get("skipped", 0) for line in after)
        assert skipped > 0 and skipped + len(after) == 402


def test_refusals_name_the_tenant_of_the_token(tmp_path):
    """Not the one that the metadata say."""
    path, auth = tmp_path / "audit", tmp_path / "auth"
    token, line = new_token("team-a", "read")
    other, another = new_token("team-a", "admin")
    auth.write_text(f"{line}\n{another}\n")
    with Daemon("--audit-log", str(path), "--auth-file", str(auth)) as daemon:
        stub = admin_pb2_grpc.AdminStub(daemon.channel())
        for metadata in (bearer(token), bearer(other), bearer(token, "team-b")):
            with refused(grpc.StatusCode.PERMISSION_DENIED):
                stub.Drain(admin_pb2.DrainRequest(), timeout=TIMEOUT, metadata=metadata)
        assert [(line["event"], line["tenant"]) for line in lines(path)] == [("refused", "team-a")] * 3


def test_a_file_that_cannot_be_opened_is_refused(tmp_path):
    with pytest.raises(AssertionError):
        Daemon("--audit-log", str(tmp_path / "no" / "audit"))


def test_slow_calls(tmp_path):
    with Daemon("--slow-call", "1ms") as daemon:
        cache = Cache(Tenant(daemon.stub(), "team-a"), "one", layers=1)
        cache.append(0, *cache.rows(8192))
        request = kv.AttendRequest(items=[cache.item(7680, q=cache.queries(512))])
        daemon.stub().Attend(request, timeout=TIMEOUT, metadata=[("qkv-tenant", "team-a"), ("traceparent", TRACE)])
        wait_for(lambda: any(line["message"] == "slow call" and line.get("traceparent") == TRACE
                             for line in daemon.log_lines()), "the call is not in the log")
        line = next(line for line in daemon.log_lines() if line.get("traceparent") == TRACE)
        assert (line["call"], line["tenant"], line["status"]) == ("/qkv.v1.KvCache/Attend", "team-a", "OK")
        assert line["session"] == "one"
        parts = [line[part] for part in ("message_ms", "quota_ms", "queue_ms", "work_ms")]
        assert all(part >= 0 for part in parts) and abs(sum(parts) - line["ms"]) < 0.01
        assert line["work_ms"] > 0.5 and line["quota_ms"] == 0
    with Daemon() as daemon:
        cache = Cache(daemon.stub(), "one", layers=1)
        cache.append(0, *cache.rows(8192))
        cache.stub.Attend(kv.AttendRequest(items=[cache.item(7680, q=cache.queries(512))]), timeout=TIMEOUT)
        assert "slow call" not in daemon.log_text()


def test_slow_steps_of_streams(tmp_path):
    """Each message of a stream that takes long, while the stream goes on, with its own session; what waits is no step."""
    with Daemon("--slow-call", "1ms") as daemon:
        pair = [Cache(Tenant(daemon.stub(), "team-a"), name, layers=1) for name in ("one", "two")]
        for cache in pair:
            cache.append(0, *cache.rows(8192))
        small = kv.AttendRequest(items=[pair[0].item(8191, q=pair[0].queries(1))])
        large = [kv.AttendRequest(items=[cache.item(7680, q=cache.queries(512))]) for cache in pair]

        def messages():
            yield small
            time.sleep(1)
            yield from large

        metadata = [("qkv-tenant", "team-a"), ("traceparent", TRACE)]
        begin = time.monotonic()
        for answer in daemon.stub().Decode(messages(), timeout=TIMEOUT, metadata=metadata):
            assert answer.results[0].status.code == 0
        busy_ms = (time.monotonic() - begin - 1) * 1000

        def steps():
            return [line for line in daemon.log_lines() if line["message"] == "slow step" and line.get("traceparent") == TRACE]

        wait_for(lambda: {"one", "two"} <= {line["session"] for line in steps()}, "the steps are not in the log")
        for line in steps():
            assert (line["call"], line["tenant"], line["status"]) == ("/qkv.v1.KvCache/Decode", "team-a", "OK")
            parts = [line[part] for part in ("quota_ms", "queue_ms", "work_ms")]
            assert line["message_ms"] == 0 and all(part >= 0 for part in parts)
            assert abs(sum(parts) - line["ms"]) < 0.01 and line["ms"] >= 1
        assert sum(line["ms"] for line in steps()) <= busy_ms
        assert not any(line["message"] == "slow call" and line["call"].endswith(("/Decode", "/Append"))
                       for line in daemon.log_lines())
        rows = iter([kv.AppendRequest(items=[pair[1].item(8192, *pair[1].rows(8192))])])
        daemon.stub().Append(rows, timeout=TIMEOUT, metadata=[("qkv-tenant", "team-a")])
        wait_for(lambda: any(line["message"] == "slow step" and line["call"].endswith("/Append") and line["session"] == "two"
                             for line in daemon.log_lines()), "the append's step is not in the log")
