"""Attends of many queries over sessions that are on the SSD: what is read for their turns, and what others get
meanwhile."""

import contextlib

import numpy as np
import pytest

from daemon import SANITIZED, Daemon, wait_for
from kv import TIMEOUT, Cache, Tenant
from qkv.v1 import kv_cache_pb2 as kv
from test_device import failing_disk
from test_http import ADMIN, attend_runs

TOKENS = 16000  # 250 pages


@pytest.fixture
def cold(tmp_path):
    """A daemon and sessions of which nothing is in memory, of a tenant."""
    @contextlib.contextmanager
    def begin(count, *arguments, environment=None, look=None):
        common = ("--data-dir", str(tmp_path / "data"), "--calibrate-tokens", "0", "--ema-every", "0")
        with Daemon(*common) as daemon:
            caches = [Cache(Tenant(daemon.stub(), "a"), f"s{i}", layers=1, kv_heads=1, q_heads=1, key_dim=64, value_dim=64,
                            recent_window=0, durability=kv.DURABILITY_SYNC, seed=i) for i in range(count)]
            for cache in caches:
                for position in range(0, TOKENS, 4000):
                    cache.append(position, *cache.rows(4000))
            if look is not None:
                look(caches)
        with Daemon(*common, "--threads", "1", "--storage-read-ahead", "0", *ADMIN, *arguments,
                    environment=environment) as daemon:
            for cache in caches:
                cache.stub = Tenant(daemon.stub(), "a")
            assert caches[0].info().tokens_cold == TOKENS
            yield daemon, caches
    return begin


@contextlib.contextmanager
def long_attends(daemon, caches):
    """Minutes of a thread each."""
    calls = []
    for cache in caches:
        request = kv.AttendRequest(items=[cache.item(TOKENS, q=cache.queries(100_000))])
        calls.append(daemon.stub().Attend.future(request, timeout=TIMEOUT, metadata=(("qkv-tenant", "a"),)))
    yield calls
    assert not any(call.done() for call in calls), [call.done() and call.details() for call in calls]
    for call in calls:
        call.cancel()


def restored(daemon):
    return daemon.metric("qkvd_storage_restored_bytes_total")


def test_what_has_come_back_is_attended_by_threads_that_compute(cold):
    """First turns bring pages back on threads that may wait for it; after that, one attend at a time has the thread."""
    with cold(4) as (daemon, caches), long_attends(daemon, caches):
        wait_for(lambda: daemon.metric("qkvd_queue_jobs") >= 3, "they compute on threads that wait for the disk")
        assert restored(daemon) > 0


@pytest.mark.skipif(SANITIZED, reason="a library before libc and sanitizers do not go together")
def test_pages_are_kept_for_as_long_as_they_took_to_come_back(cold, tmp_path):
    """Three attends take memory from each other, which holds the pages of two: they do not read them for every turn."""
    slow = tmp_path / "slow"
    slow.touch()
    disk = {"LD_PRELOAD": failing_disk(), "SLOW_READ": str(slow)}
    with cold(3, "--memory-budget", "3MiB", "--storage-io", "pread", environment=disk) as (daemon, caches):
        stored = caches[0].info().bytes_stored
        with long_attends(daemon, caches):
            wait_for(lambda: attend_runs(daemon) >= 40, "they do not get on")
            turns = attend_runs(daemon)
            assert restored(daemon) < stored * turns / 4


def test_attends_in_pieces_leave_threads(cold, tmp_path):
    """Of as many attends as may wait for the disk at a time none fits into memory at once: what else of their tenant
    waits for the disk has its turn between those of pieces."""
    quotas = tmp_path / "quotas"
    quotas.write_text("a host_bytes=900KiB\n")
    with cold(9, "--quota-file", str(quotas)) as (daemon, caches), long_attends(daemon, caches[:8]):
        wait_for(lambda: restored(daemon) > 1 << 20, "nothing comes back")
        assert caches[8].fetch(range={"begin": 0, "end": 64})[0].shape[0] == 64


def test_a_layer_larger_than_the_quota(cold, tmp_path):
    """It is attended in pieces, of which several fit into the tenant's memory."""
    expected = []
    quotas = tmp_path / "quotas"
    quotas.write_text("a host_bytes=512KiB\n")
    q = np.random.default_rng(3).standard_normal((40, 1, 64)).astype(np.float32)
    with cold(1, "--quota-file", str(quotas), look=lambda caches: expected.append(caches[0].attend(TOKENS, q))) as (
            daemon, caches):
        assert caches[0].info().bytes_stored > 1 << 20
        for got, one in zip(caches[0].attend(TOKENS, q), expected[0]):
            assert np.abs(got - one).max() < 1e-5


def test_a_turn_needs_what_its_queries_see(cold, tmp_path):
    """The windows of a turn's queries fit into the tenant's memory, those of all do not: turn by turn they come back,
    and the numbers are those of pages that stay in memory."""
    expected = []
    quotas = tmp_path / "quotas"
    quotas.write_text("a host_bytes=900KiB\n")
    q = np.random.default_rng(4).standard_normal((TOKENS, 1, 64)).astype(np.float32)

    def attend(cache):
        return cache.attend(0, q, options=kv.AttendOptions(sliding_window=200))

    with cold(1, "--quota-file", str(quotas), look=lambda caches: expected.append(attend(caches[0]))) as (
            daemon, caches):
        stored = caches[0].info().bytes_stored
        assert stored > 1 << 20
        for got, one in zip(attend(caches[0]), expected[0]):
            assert np.array_equal(got, one)
