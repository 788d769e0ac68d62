"""In memory, what closes sessions for a tenant at its quota waits until they have been left: on no thread that others need."""

import grpc
import pytest

from daemon import Daemon, wait_for
from kv import FP16, TIMEOUT, Cache, Tenant
from qkv.v1 import admin_pb2, admin_pb2_grpc, model_pb2, objects_pb2, objects_pb2_grpc
from qkv.v1 import kv_cache_pb2 as kv
from test_http import ADMIN, attend_runs

HELD, CALLS = 12, 3
TENANT = (("qkv-tenant", "a"),)


class Full:
    """A tenant at its quota, with sessions that may be closed. An attend has them all for seconds, so that their memory stays: a
    call that wants memory closes some, and waits 0.2 s, four times."""

    def __init__(self, daemon):
        self.daemon, stub = daemon, Tenant(daemon.stub(), "a")
        self.cache = Cache(stub, "held", layers=1, kv_heads=2, q_heads=2, key_dim=128, value_dim=16)
        request = kv.AppendRequest(items=[self.cache.item(0, *self.cache.rows(4096))])
        attend = kv.AttendRequest()
        for i in range(HELD):
            name = request.items[0].session = f"held-{i}"
            stub.OpenSession(kv.OpenSessionRequest(session=name, model=self.cache.model.name, retention=kv.RETENTION_EVICT),
                             timeout=TIMEOUT)
            stub.Append(iter([request]), timeout=TIMEOUT)
            attend.items.append(self.cache.item(4096, q=self.cache.queries(3000)))
            attend.items[-1].session = name
        admin = admin_pb2_grpc.AdminStub(daemon.channel())
        usage = admin.GetQuota(admin_pb2.GetQuotaRequest(tenant="a"), timeout=TIMEOUT).tenants[0].usage
        quota = admin_pb2.Quota(tenant="a", host_bytes=usage.host_bytes + 64)
        admin.SetQuota(admin_pb2.SetQuotaRequest(quota=quota), timeout=TIMEOUT)
        self.attend = daemon.stub().Attend.future(attend, timeout=TIMEOUT, metadata=TENANT)
        wait_for(lambda: attend_runs(daemon) > 0, "the attend has not begun")

    def open(self, i):
        request = kv.OpenSessionRequest(session=f"new-{i}", model=self.cache.model.name)
        return self.daemon.stub().OpenSession.future(request, timeout=TIMEOUT, metadata=TENANT)

    def append(self, i):
        """Opens the session that it appends to."""
        opened = kv.OpenSessionRequest(session=f"new-{i}", model=self.cache.model.name)
        request = kv.AppendRequest(open=[opened], complete=True)
        return self.daemon.stub().Append.future(iter([request]), timeout=TIMEOUT, metadata=TENANT)

    def put(self, i):
        begin = objects_pb2.ObjectInfo(object=f"new-{i}", bytes=1)
        request = objects_pb2.PutObjectsRequest(pieces=[objects_pb2.PutPiece(begin=begin, data=b"x")])
        stub = objects_pb2_grpc.ObjectsStub(self.daemon.channel())
        return stub.PutObjects.future(iter([request]), timeout=TIMEOUT, metadata=TENANT)

    def end(self, calls):
        assert not self.attend.done()
        self.attend.cancel()
        for call in calls:
            assert call.code() in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.fixture
def full(tmp_path):
    quotas = tmp_path / "quotas"
    quotas.write_text("b host_bytes=64MiB\n")
    with Daemon("--quota-file", str(quotas), "--threads", "1", "--codec", "exact", *ADMIN) as daemon:
        yield Full(daemon)


@pytest.mark.parametrize("what", ["open", "append", "put"])
def test_they_wait_on_threads_of_their_own(full, what):
    """With one thread that computes, and one that reads for all."""
    calls = [getattr(full, what)(i) for i in range(CALLS)]
    wait_for(lambda: full.daemon.metric("qkvd_sessions_evicted_total") >= 1, "nothing is evicted")
    assert not any(call.done() for call in calls), "the thread that reads has waited"
    wait_for(lambda: full.daemon.metric("qkvd_queue_jobs") == 0 or any(call.done() for call in calls), "they wait")
    assert not any(call.done() for call in calls), "the thread that computes waits"
    full.end(calls)


def test_a_place_takes_no_memory_for_coders(tmp_path):
    """The coders of a new session are there already: where its tenant has no place for it, one session is closed."""
    quotas = tmp_path / "quotas"
    quotas.write_text("a sessions=4 host_bytes=4MiB\n")
    with Daemon("--quota-file", str(quotas), "--codec", "ecsq", "--calibrate-tokens", "0") as daemon:
        stub = Tenant(daemon.stub(), "a")
        wide = model_pb2.Model(name="wide", layers=8, kv_heads=64, q_heads=64, key_dim=16, value_dim=16, dtype=FP16)
        stub.RegisterModel(model_pb2.RegisterModelRequest(model=wide), timeout=TIMEOUT)
        for i in range(6):
            request = kv.OpenSessionRequest(session=f"s{i}", model=wide.name, retention=kv.RETENTION_EVICT)
            stub.OpenSession(request, timeout=TIMEOUT)
            assert daemon.metric("qkvd_sessions_evicted_total") == max(0, i - 3)
