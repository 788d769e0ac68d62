"""Sessions that are folded: of which nothing is in memory but their name, their config and their place in the lists."""

import concurrent.futures
import copy
import time

import grpc
import numpy as np
import pytest

from daemon import Daemon, wait_for
from kv import TIMEOUT, Cache, refused
from qkv.v1 import admin_pb2, admin_pb2_grpc, model_pb2, tensor_pb2
from qkv.v1 import kv_cache_pb2 as kv

ASYNC, SYNC = kv.DURABILITY_ASYNC, kv.DURABILITY_SYNC
LAYERS, TOKENS = 3, 300


@pytest.fixture
def start(tmp_path):
    """Starts daemons on one directory, one after the other, which fold at once."""
    def make(*arguments):
        return Daemon("--data-dir", str(tmp_path / "data"), "--storage-segment", "4MiB", "--calibrate-tokens", "0",
                      *(arguments if "--fold-after" in arguments else ("--fold-after", "1ms", *arguments)))
    return make


def folded(daemon):
    return daemon.metric("qkvd_storage_folded_sessions")


def unfolded(daemon):
    return daemon.metric("qkvd_storage_unfolded_sessions_total")


def fill(cache, ids=()):
    for layer in range(LAYERS):
        cache.append(0, *cache.rows(TOKENS), layer=layer, token_ids=ids)
    return cache


def make(daemon, name="s", durability=SYNC, ids=(), seed=1):
    return fill(Cache(daemon.stub(), name, layers=LAYERS, durability=durability, recent_window=16, seed=seed), ids)


def sink(cache):
    cache.stub.CloseSession(kv.CloseSessionRequest(session=cache.name, keep=True), timeout=TIMEOUT)


def fold(daemon, *caches):
    """Sinks sessions and waits until they are folded."""
    before = folded(daemon)
    for cache in caches:
        sink(cache)
    wait_for(lambda: folded(daemon) == before + len(caches), "the sessions to be folded")


def rows(cache, layer=0):
    return cache.fetch(layers=(layer,), range=tensor_pb2.TokenRange(begin=0, end=TOKENS))


def assert_same(before, after):
    for a, b in zip(before, after):
        assert np.array_equal(a, b)


def test_a_folded_session_is_read_as_before(start):
    queries = np.random.default_rng(4).standard_normal((2, 4, 16)).astype(np.float32)
    with start() as daemon:
        cache = make(daemon)
        sink(cache)
        before, attended = [rows(cache, layer) for layer in range(LAYERS)], cache.attend(TOKENS - 1, queries)
        fold(daemon, cache)
        assert daemon.metric("qkvd_kv_bytes") < 2048  # the session itself, without its layers
        info = cache.info()  # which does not unfold it
        assert list(info.lengths) == list(info.durable) == [TOKENS] * LAYERS
        assert info.tokens_coded == info.tokens_cold == TOKENS * LAYERS and info.tokens_exact == 0
        assert info.bytes_coded == info.bytes_overhead == 0 and info.bytes_stored > 0
        listed, = cache.stub.ListSessions(kv.ListSessionsRequest(), timeout=TIMEOUT).sessions
        assert listed.session == "s" and listed.tokens_cold == TOKENS * LAYERS
        assert (folded(daemon), unfolded(daemon)) == (1, 0)
        assert_same(attended, cache.attend(TOKENS - 1, queries))
        assert unfolded(daemon) == 1
        for layer in range(LAYERS):
            assert_same(before[layer], rows(cache, layer))
        assert cache.info().bytes_stored == info.bytes_stored


@pytest.mark.parametrize("use", ["fetch", "append", "truncate", "fork", "demote", "prefetch", "statistics", "ids"])
def test_any_use_unfolds(start, use):
    with start() as daemon:
        ids = list(range(TOKENS))
        cache = make(daemon, ids=ids)
        k, v = cache.rows(TOKENS)
        sink(cache)
        before = rows(cache)
        fold(daemon, cache)
        stub = cache.stub
        if use == "append":
            cache.append(TOKENS, *cache.rows(10), layer=0)
            assert cache.info().lengths[0] == TOKENS + 10
        elif use == "truncate":
            stub.Truncate(kv.TruncateRequest(session="s", position=70), timeout=TIMEOUT)
            assert list(cache.info().lengths) == [70] * LAYERS
        elif use == "fork":
            made = stub.Fork(kv.ForkRequest(session="s", fork="t", position=128), timeout=TIMEOUT)
            assert list(made.info.lengths) == [128] * LAYERS
        elif use == "demote":
            stub.Demote(kv.DemoteRequest(session="s", bits=2), timeout=TIMEOUT)
        elif use == "prefetch":
            stub.Prefetch(kv.PrefetchRequest(session="s"), timeout=TIMEOUT)
            assert cache.info().tokens_cold == 0
        elif use == "statistics":
            answers = list(stub.GetAttentionStats(kv.GetAttentionStatsRequest(session="s"), timeout=TIMEOUT))
            assert len(answers) > 0
        elif use == "ids":
            request = kv.GetSessionRequest(session="s", token_ids=tensor_pb2.TokenRange(begin=3))
            assert list(stub.GetSession(request, timeout=TIMEOUT).token_ids) == ids[3:]
        if use != "truncate":
            end = 64  # of each of them
            assert_same([part[:end] for part in before], [part[:end] for part in rows(cache)])
        assert unfolded(daemon) >= 1


def test_a_prefix_of_a_folded_session_matches(start):
    ids = list(range(TOKENS))
    with start() as daemon:
        cache = make(daemon, ids=ids)
        sink(cache)
        before = rows(cache)
        fold(daemon, cache)
        match = cache.stub.Match(kv.MatchRequest(model=cache.model.name, token_ids=ids), timeout=TIMEOUT)
        assert (match.session, match.tokens, match.tokens_on_ssd) == ("s", 256, 256) and match.restore_ms > 0
        assert unfolded(daemon) == 0
        opened = cache.stub.OpenSession(kv.OpenSessionRequest(session="t", model=cache.model.name, durability=SYNC,
                                                              policy=model_pb2.CodecPolicy(recent_window=16),
                                                              prefix_token_ids=ids), timeout=TIMEOUT)
        assert opened.matched_tokens == 256
        assert_same([part[:256] for part in before],
                    [part[:256] for part in rows(cache)])
        # Other ids where the session has known ones are refused, as before it was folded.
        with refused(grpc.StatusCode.ALREADY_EXISTS, "token id"):
            cache.append(0, *cache.rows(TOKENS), layer=0, token_ids=[7, *ids[1:]])


def test_limits_and_deletion_without_unfolding(start):
    with start("--storage-compact-rate", "0") as daemon:
        caches = [make(daemon, f"s{i}", seed=i + 1) for i in range(4)]
        caches[0].stub.Touch(kv.TouchRequest(session="s0", ttl_ms=3000), timeout=TIMEOUT)
        fold(daemon, *caches)
        admin = admin_pb2_grpc.AdminStub(daemon.channel())

        def ssd_bytes():
            answer = admin.GetQuota(admin_pb2.GetQuotaRequest(tenant="default"), timeout=TIMEOUT)
            return answer.tenants[0].usage.ssd_bytes

        assert ssd_bytes() == sum(cache.info().bytes_stored for cache in caches)
        wait_for(lambda: len(caches[0].stub.ListSessions(kv.ListSessionsRequest(), timeout=TIMEOUT).sessions) == 3,
                 "the first one to expire")
        caches[1].stub.CloseSession(kv.CloseSessionRequest(session="s1"), timeout=TIMEOUT)
        assert unfolded(daemon) == 0
        wait_for(lambda: folded(daemon) == 2, "the others to be counted")
        assert ssd_bytes() == sum(cache.info().bytes_stored for cache in caches[2:])
        rows(caches[2])
        assert ssd_bytes() == sum(cache.info().bytes_stored for cache in caches[2:])
        daemon.kill()
    with start() as daemon:
        listed = caches[0].stub = daemon.stub()
        names = [info.session for info in listed.ListSessions(kv.ListSessionsRequest(), timeout=TIMEOUT).sessions]
        assert names == ["s2", "s3"]


def test_folded_sessions_survive_a_kill(start):
    with start() as daemon:
        caches = [make(daemon, f"s{i}", (ASYNC, SYNC)[i % 2], seed=i + 1) for i in range(3)]
        for cache in caches:
            sink(cache)
        before = [[rows(cache, layer) for layer in range(LAYERS)] for cache in caches]
        fold(daemon, *caches)
        daemon.kill()
    with start() as daemon:
        for cache in caches:
            cache.stub = daemon.stub()
        wait_for(lambda: folded(daemon) == 3, "the sessions to be folded again")
        for cache, each in zip(caches, before):
            assert list(cache.info().durable) == [TOKENS] * LAYERS
            for layer in range(LAYERS):
                assert_same(each[layer], rows(cache, layer))
        for cache in caches:
            cache.stub.CloseSession(kv.CloseSessionRequest(session=cache.name), timeout=TIMEOUT)
        storage = admin_pb2_grpc.AdminStub(daemon.channel())
        wait_for(lambda: storage.GetStorage(admin_pb2.GetStorageRequest(), timeout=TIMEOUT).records == 0, "records to go")
        wait_for(lambda: daemon.metric("qkvd_kv_bytes") == 0, "memory to be free")


def test_sessions_that_are_not_folded(start):
    """Pinned ones, those with exact rows or a contract."""
    with start() as daemon:
        pinned, plain = (make(daemon, name, seed=i + 1) for i, name in enumerate(["pinned", "plain"]))
        contract = copy.copy(plain)
        contract.name = "contract"
        plain.stub.OpenSession(kv.OpenSessionRequest(session="contract", model=plain.model.name, durability=SYNC,
                                                     max_attention_error=0.1), timeout=TIMEOUT)
        fill(contract)
        pinned.stub.Pin(kv.PinRequest(session="pinned"), timeout=TIMEOUT)
        for cache in pinned, contract:
            sink(cache)
        fold(daemon, plain)
        time.sleep(0.6)  # more than two looks
        assert folded(daemon) == 1


def forked(parent, name, position):
    parent.stub.Fork(kv.ForkRequest(session=parent.name, fork=name, position=position), timeout=TIMEOUT)
    fork = copy.copy(parent)
    fork.name = name
    return fork


def shared_rows(cache, layer=0):
    return cache.fetch(layers=(layer,), range=tensor_pb2.TokenRange(begin=0, end=256))


def make_family(daemon, forks):
    """A parent in memory, all of it durable, and forks of its first 256 tokens, which are folded."""
    parent = make(daemon, "parent", durability=ASYNC, ids=list(range(TOKENS)))
    wait_for(lambda: min(parent.info().durable) >= 256, "pages to be durable")
    alone = daemon.metric("qkvd_kv_bytes")
    made = [forked(parent, f"fork{i}", 256) for i in range(forks)]
    wait_for(lambda: folded(daemon) == forks, "the forks to be folded")
    return parent, made, alone


def test_forks_of_a_session_in_memory(start):
    with start() as daemon:
        parent, forks, alone = make_family(daemon, 20)
        admin = admin_pb2_grpc.AdminStub(daemon.channel())

        def ssd_bytes():
            return admin.GetQuota(admin_pb2.GetQuotaRequest(tenant="default"), timeout=TIMEOUT).tenants[0].usage.ssd_bytes

        stored = parent.info().bytes_stored
        assert ssd_bytes() == stored
        assert daemon.metric("qkvd_kv_bytes") <= alone + 20 * 128 + 1024  # and what they have alike
        info = forks[3].info()
        assert list(info.lengths) == [256] * LAYERS and info.tokens_cold == 0
        assert info.bytes_shared == info.bytes_coded > 0 and info.bytes_stored == stored
        assert parent.info().tokens_cold == 0 and parent.info().bytes_shared == 0
        match = parent.stub.Match(kv.MatchRequest(model=parent.model.name, token_ids=list(range(256))), timeout=TIMEOUT)
        assert (match.tokens, match.tokens_on_ssd) == (256, 0)
        assert unfolded(daemon) == 0
        before = [shared_rows(parent, layer) for layer in range(LAYERS)]
        held = daemon.metric("qkvd_kv_bytes")
        for layer in range(LAYERS):
            assert_same(before[layer], shared_rows(forks[3], layer))
        assert unfolded(daemon) == 1
        assert daemon.metric("qkvd_kv_bytes") < held + info.bytes_coded / 2  # layers, no pages
        assert ssd_bytes() == stored
        forks[4].stub.Touch(kv.TouchRequest(session="fork4", ttl_ms=1), timeout=TIMEOUT)
        wait_for(lambda: folded(daemon) == 19, "the fork to be folded again, another one to expire")
        assert ssd_bytes() == stored


@pytest.mark.parametrize("what", ["close", "truncate", "sink", "compact", "kill"])
def test_the_parent_of_folded_forks(start, what):
    with start("--storage-compact-rate", "0") as daemon:
        parent, forks, _ = make_family(daemon, 3)
        before = [shared_rows(parent, layer) for layer in range(LAYERS)]
        stub, admin = parent.stub, admin_pb2_grpc.AdminStub(daemon.channel())
        if what == "close":
            stub.CloseSession(kv.CloseSessionRequest(session="parent"), timeout=TIMEOUT)
            assert forks[0].info().tokens_cold == LAYERS * 256
        elif what == "truncate":
            stub.Truncate(kv.TruncateRequest(session="parent", position=70), timeout=TIMEOUT)
            for layer in range(LAYERS):
                parent.append(70, *(part[::-1] for part in parent.rows(230)), layer=layer)
        elif what == "sink":
            sink(parent)
            wait_for(lambda: folded(daemon) == 4, "the parent to be folded, too")
        elif what == "compact":
            other = make(daemon, "other", seed=9)
            other.stub.CloseSession(kv.CloseSessionRequest(session="other"), timeout=TIMEOUT)
            stub.CloseSession(kv.CloseSessionRequest(session="parent"), timeout=TIMEOUT)
            admin.Compact(admin_pb2.CompactRequest(), timeout=TIMEOUT)
        if what != "kill":
            assert_same(before[1], shared_rows(forks[1], 1))
        forks[2].stub.CloseSession(kv.CloseSessionRequest(session="fork2"), timeout=TIMEOUT)
        daemon.kill()
    with start() as daemon:
        for fork in forks[:2]:
            fork.stub = daemon.stub()
            assert list(fork.info().durable) == [256] * LAYERS
            for layer in range(LAYERS):
                assert_same(before[layer], shared_rows(fork, layer))
        storage = admin_pb2_grpc.AdminStub(daemon.channel())
        for info in forks[0].stub.ListSessions(kv.ListSessionsRequest(), timeout=TIMEOUT).sessions:
            forks[0].stub.CloseSession(kv.CloseSessionRequest(session=info.session), timeout=TIMEOUT)
        wait_for(lambda: storage.GetStorage(admin_pb2.GetStorageRequest(), timeout=TIMEOUT).records == 0, "records to go")
        wait_for(lambda: daemon.metric("qkvd_kv_bytes") == 0, "memory to be free")


@pytest.mark.parametrize("order", ["parent", "fork"])
def test_what_the_parent_alone_has_leaves_with_it(start, order):
    """Of a range that both have, the fork sees four pages."""
    with start() as daemon:
        parent = Cache(daemon.stub(), "parent", layers=LAYERS, durability=ASYNC, recent_window=16)
        for layer in range(LAYERS):
            parent.append(0, *parent.rows(700), layer=layer)
        fork = forked(parent, "fork", 256)
        for layer in range(LAYERS):
            fork.append(256, *fork.rows(256), layer=layer)
        admin = admin_pb2_grpc.AdminStub(daemon.channel())

        def both_are_folded():
            """Pages of the parent alone stay in memory where their range was used by the fork at that time: until memory is
            needed, or the parent is sunk again."""
            for cache in (parent, fork) if order == "parent" else (fork, parent):
                sink(cache)
            return folded(daemon) == 2

        wait_for(both_are_folded, "both to be folded")
        assert daemon.metric("qkvd_kv_bytes") < 4096  # names, no pages
        parent.stub.CloseSession(kv.CloseSessionRequest(session="parent"), timeout=TIMEOUT)
        usage = admin.GetQuota(admin_pb2.GetQuotaRequest(tenant="default"), timeout=TIMEOUT).tenants[0].usage
        assert usage.ssd_bytes == fork.info().bytes_stored
        fork.stub.CloseSession(kv.CloseSessionRequest(session="fork"), timeout=TIMEOUT)
        assert daemon.metric("qkvd_kv_bytes") == 0


def test_never(start):
    with start("--fold-after", "0") as daemon:
        sink(make(daemon))
        time.sleep(0.6)
        assert folded(daemon) == 0


def test_uses_and_folding_at_once(start):
    """Four clients use a few sessions that are sunk and folded all the time, with little memory."""
    ids = list(range(TOKENS))
    with start("--memory-budget", "8MiB") as daemon:
        caches = [make(daemon, f"s{i}", ids=ids, seed=i + 1) for i in range(4)]
        for cache in caches:
            sink(cache)
        before = [rows(cache) for cache in caches]
        until = time.monotonic() + 4

        def use(client):
            random, count = np.random.default_rng(client), 0
            while time.monotonic() < until:
                cache, what = caches[random.integers(4)], random.integers(5)
                if what == 0:
                    sink(cache)
                elif what == 1:
                    time.sleep(0.02)
                elif what == 2:
                    assert list(cache.info().lengths) == [TOKENS] * LAYERS
                else:
                    assert_same(before[caches.index(cache)], rows(cache))
                    count += 1
            return count

        with concurrent.futures.ThreadPoolExecutor(4) as clients:
            assert sum(clients.map(use, range(4))) > 10
        assert unfolded(daemon) > 0
