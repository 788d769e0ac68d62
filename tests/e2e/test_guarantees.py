"""What is guaranteed to a tenant of memory, while others take memory."""

import pytest

from daemon import Daemon
from kv import Cache, Tenant
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import objects_pb2_grpc
from test_quotas import MIB, Admin, put_object


@pytest.fixture
def guarantee(tmp_path):
    """Of 64 MiB, 4 are guaranteed to a tenant, and another one appends until something leaves memory."""
    quotas = tmp_path / "quotas"
    quotas.write_text("safe host_bytes_guaranteed=4MiB\n")
    with Daemon("--quota-file", str(quotas), "--data-dir", str(tmp_path / "data"), "--memory-budget", "64MiB",
                "--memory-high", "1", "--calibrate-tokens", "0") as daemon:
        def flood():
            sessions = 0
            while daemon.metric("qkvd_storage_evicted_bytes_total") == 0 and sessions < 200:
                cache = Cache(Tenant(daemon.stub(), "flood"), f"f{sessions}", layers=1, recent_window=0)
                for position in range(0, 32768, 8192):
                    cache.append(position, *cache.rows(8192))
                sessions += 1
            assert daemon.metric("qkvd_storage_evicted_bytes_total") > 0

        yield daemon, flood


def test_what_is_guaranteed_stays(guarantee):
    """Another tenant's appends take memory from what is not guaranteed, though it was used later."""
    daemon, flood = guarantee
    safe = Cache(Tenant(daemon.stub(), "safe"), "s", layers=1, recent_window=0)
    for position in range(0, 32768, 8192):
        safe.append(position, *safe.rows(8192))
    before = Admin(daemon).usage("safe").host_bytes
    flood()
    assert before > MIB and Admin(daemon).usage("safe").host_bytes == before


def test_no_more_than_what_is_not_guaranteed_leaves(guarantee):
    """A session of which a part is guaranteed keeps that part, but for less than a page."""
    daemon, flood = guarantee
    safe = Cache(Tenant(daemon.stub(), "safe"), "s", layers=1, recent_window=0)
    position = 0
    while Admin(daemon).usage("safe").host_bytes < 5 * MIB:
        safe.append(position, *safe.rows(8192))
        position += 8192
    before = Admin(daemon).usage("safe").host_bytes
    flood()
    assert 4 * MIB - 65536 < Admin(daemon).usage("safe").host_bytes < before


def test_objects_that_are_guaranteed_stay(guarantee):
    daemon, flood = guarantee
    objects = Tenant(objects_pb2_grpc.ObjectsStub(daemon.channel()), "safe")
    put_object(objects, "o", bytes(3 * MIB))
    before = Admin(daemon).usage("safe").host_bytes
    flood()
    assert before >= 3 * MIB and Admin(daemon).usage("safe").host_bytes == before


def test_objects_that_are_guaranteed_are_not_deleted_for_others(tmp_path):
    """Without an SSD, sessions and objects that may go are deleted where memory is full: first those of others."""
    quotas = tmp_path / "quotas"
    quotas.write_text("safe host_bytes_guaranteed=4MiB\n")
    with Daemon("--quota-file", str(quotas), "--memory-budget", "64MiB", "--memory-high", "1", "--calibrate-tokens",
                "0") as daemon:
        stubs = {tenant: Tenant(objects_pb2_grpc.ObjectsStub(daemon.channel()), tenant) for tenant in ("safe", "flood")}
        put_object(stubs["safe"], "o", bytes(3 * MIB), retention=kv.RETENTION_EVICT)
        sent = 0
        while daemon.metric("qkvd_objects_evicted_total") == 0 and sent < 100:
            put_object(stubs["flood"], f"f{sent}", bytes(2 * MIB), retention=kv.RETENTION_EVICT)
            sent += 1
        assert daemon.metric("qkvd_objects_evicted_total") > 0
        assert Admin(daemon).usage("safe").host_bytes >= 3 * MIB
