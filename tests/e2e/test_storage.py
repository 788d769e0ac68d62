"""The SSD tier through the real daemon: sessions that outlive it and that are larger than its memory."""

import copy
import glob
import json
import subprocess
import time

import grpc
import numpy as np
import pytest

from daemon import PATIENCE, Daemon, binary, clean_environment, wait_for
from kv import TIMEOUT, Cache, array_of, assert_close, refused
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2, tensor_pb2
from test_http import ADMIN, attend_runs

ASYNC, SYNC = kv.DURABILITY_ASYNC, kv.DURABILITY_SYNC
LAYERS = 2


@pytest.fixture(params=["uring", "pread"])
def start(request, tmp_path):
    """Starts daemons on one directory, one after the other."""
    def make(*arguments):
        return Daemon("--data-dir", str(tmp_path / "data"), "--storage-io", request.param, "--storage-segment", "4MiB",
                      *arguments)
    return make


def open_cache(daemon, durability=SYNC, name="s", **fields):
    return Cache(daemon.stub(), name, layers=LAYERS, durability=durability, recent_window=16, **fields)


def open_session(daemon, cache, name):
    """Another session of a cache's model."""
    made = copy.copy(cache)
    made.stub, made.name = daemon.stub(), name
    made.stub.OpenSession(kv.OpenSessionRequest(session=name, model=cache.model.name, durability=SYNC,
                                                policy=model_pb2.CodecPolicy(recent_window=16)))
    return made


def reopen(daemon, cache):
    """The same session in another daemon."""
    cache.stub = daemon.stub()
    return cache


def fill(cache, tokens, position=0):
    for layer in range(LAYERS):
        cache.append(position, *cache.rows(tokens), layer=layer)


def rows(cache, end, layer=0):
    return cache.fetch(layers=(layer,), range=tensor_pb2.TokenRange(begin=0, end=end))


def assert_same_rows(before, after):
    for a, b in zip(before, after):
        assert np.array_equal(a, b)


def test_synced_rows_survive_a_kill(start):
    with start() as daemon:
        cache = open_cache(daemon)
        fill(cache, 300)
        info = cache.info()
        assert info.durability == SYNC
        assert list(info.durable) == [300] * LAYERS
        before = [rows(cache, 300, layer) for layer in range(LAYERS)]
        daemon.kill()
    with start() as daemon:
        reopen(daemon, cache)
        info = cache.info()
        assert list(info.lengths) == list(info.durable) == [300] * LAYERS
        # 16 tokens are recent: four pages.
        assert info.tokens_cold == 256 * LAYERS and info.bytes_coded == 0 and info.tokens_exact == 44 * LAYERS
        for layer in range(LAYERS):
            assert_same_rows(before[layer], rows(cache, 300, layer))
        fill(cache, 100, position=300)  # goes on where it ended
        assert list(cache.info().lengths) == [400] * LAYERS


def test_a_clean_stop_keeps_everything(start):
    queries = np.random.default_rng(3).standard_normal((2, 4, 16)).astype(np.float32)
    with start() as daemon:
        cache = open_cache(daemon, ASYNC)
        fill(cache, 150)
        exact, _ = cache.attend(149, queries)
        before = rows(cache, 128)
    with start() as daemon:
        reopen(daemon, cache)
        assert list(cache.info().durable) == [150] * LAYERS
        assert_same_rows(before, rows(cache, 128))
        coded, _ = cache.attend(149, queries)  # the recent window is coded now
        assert np.abs(coded - exact).max() < 0.2


def test_a_clean_stop_keeps_the_exact_rows_of_sync_sessions(start):
    queries = np.random.default_rng(5).standard_normal((2, 4, 16)).astype(np.float32)
    with start() as daemon:
        cache = open_cache(daemon)
        fill(cache, 300)
        before = [rows(cache, 300, layer) for layer in range(LAYERS)]
        first = cache.attend(299, queries)
    with start() as daemon:
        reopen(daemon, cache)
        info = cache.info()
        assert list(info.lengths) == list(info.durable) == [300] * LAYERS
        assert info.tokens_cold == 256 * LAYERS and info.tokens_exact == 44 * LAYERS
        for layer in range(LAYERS):
            assert_same_rows(before[layer], rows(cache, 300, layer))
        assert_same_rows(first, cache.attend(299, queries))
        cache.stub.CloseSession(kv.CloseSessionRequest(session="s", keep=True))  # which is asked to leave memory
        assert cache.info().tokens_exact == 0


def test_attend_is_the_same_from_the_disk(start):
    queries = np.random.default_rng(4).standard_normal((3, 4, 16)).astype(np.float32)
    with start("--storage-read-ahead", "0") as daemon:
        cache = open_cache(daemon, ASYNC)
        fill(cache, 500)
        cache.stub.CloseSession(kv.CloseSessionRequest(session="s", keep=True))
        info = cache.info()
        assert info.tokens_exact == 0 and info.bytes_coded == 0 and info.tokens_cold == 500 * LAYERS
        first = cache.attend(499, queries)
        assert cache.info().tokens_cold == 500  # one layer has come back
        assert_same_rows(first, cache.attend(499, queries))
        assert daemon.metric("qkvd_storage_restored_pages_total") == 8


def test_layers_to_come_are_read_ahead(start):
    """As far as the bytes go; attended they are the same, and Fetch reads its next run ahead."""
    queries = np.random.default_rng(6).standard_normal((1, 4, 16)).astype(np.float32)
    layers = 8
    with start("--storage-read-ahead", "64KiB", "--ema-every", "0", "--calibrate-tokens", "0") as daemon:
        cache = Cache(daemon.stub(), "s", layers=layers, durability=ASYNC, recent_window=16)
        for layer in range(layers):
            cache.append(0, *cache.rows(500), layer=layer)
        cache.stub.CloseSession(kv.CloseSessionRequest(session="s", keep=True))
        each = cache.info().bytes_stored // layers
        ahead = 64 * 1024 // each  # layers
        assert 1 < ahead < layers - 1
        part = int((64 * 1024 - ahead * each) / each * 500) // 64 * 64  # tokens of the layer behind these
        assert part > 0
        cache.attend(499, queries, layer=layers - 1)  # of the first turn: nothing is behind the last layer
        assert daemon.metric("qkvd_storage_read_ahead_bytes_total") == 0
        cache.stub.CloseSession(kv.CloseSessionRequest(session="s", keep=True))
        before = [cache.attend(499, queries, layer=0)]
        wait_for(lambda: cache.info().tokens_cold == 500 * (layers - 1 - ahead) - part, "nothing is read ahead")
        wait_for(lambda: ahead * each < daemon.metric("qkvd_storage_read_ahead_bytes_total") <= 64 * 1024, "or too much")
        for layer in range(1, layers):
            before.append(cache.attend(499, queries, layer=layer))
        restored = (layers + 1) * 8
        wait_for(lambda: daemon.metric("qkvd_storage_restored_pages_total") == restored, "pages have not come once")
        assert cache.info().tokens_cold == 0
        for layer in range(layers):
            assert_same_rows(before[layer], cache.attend(499, queries, layer=layer))
        # It has been gone through twice: behind the last layer comes the first one.
        cache.stub.CloseSession(kv.CloseSessionRequest(session="s", keep=True))
        seen = daemon.metric("qkvd_storage_read_ahead_bytes_total")
        assert_same_rows(before[-1], cache.attend(499, queries, layer=layers - 1))
        wait_for(lambda: cache.info().tokens_cold == 500 * (layers - 1 - ahead) - part, "nor around")
        for layer in range(layers):
            assert_same_rows(before[layer], cache.attend(499, queries, layer=layer))
        cache.append(500, *cache.rows(12000))
        seen = daemon.metric("qkvd_storage_read_ahead_bytes_total")

        def fetched_ahead():  # unless the fetch itself was faster
            cache.stub.CloseSession(kv.CloseSessionRequest(session="s", keep=True))
            assert rows(cache, 12500)[0].shape == (12500, 2, 16)
            return daemon.metric("qkvd_storage_read_ahead_bytes_total") > seen
        wait_for(fetched_ahead, "no run is read ahead")


def test_more_than_memory(start):
    """Eight times the budget: appended, kept, and read back."""
    budget, sessions, tokens = 1 << 20, 24, 4096
    with start("--memory-budget", str(budget), "--memory-high", "1", "--memory-low", "1", "--ema-every", "0",
               "--storage-dirty", "1MiB", "--calibrate-tokens", "0") as daemon:
        caches = [open_cache(daemon, ASYNC, f"s{i}", seed=i) for i in range(sessions)]
        for cache in caches:
            for position in range(0, tokens, 1024):
                fill(cache, 1024, position)
        stored = sum(cache.info().bytes_stored for cache in caches)
        assert stored > 6 * budget
        assert daemon.metric("qkvd_kv_bytes") <= budget
        last = tokens - 64
        for cache in caches:
            k = np.random.default_rng(caches.index(cache)).standard_normal((1024, 2, 16)).astype(np.float32)
            got, _ = rows(cache, 64)
            assert np.abs(got - k[:64]).mean() < 0.2  # the rows that were sent, coded
            assert rows(cache, last)[0].shape == (last, 2, 16)
        assert daemon.metric("qkvd_storage_evicted_bytes_total") > 4 * budget


def test_buffers_and_directories_are_part_of_the_budget(start):
    with start("--memory-budget", "64MiB", "--calibrate-tokens", "0") as daemon:
        def reserved():
            return daemon.metric("qkvd_kv_reserved_bytes") - (4 << 20)

        def known():
            return daemon.metric("qkvd_storage_known_bytes")
        wait_for(lambda: reserved() == known(), "the empty index is not counted")
        empty = known()
        assert empty < 16384
        cache = open_cache(daemon)
        fill(cache, 4000)
        records = daemon.metric("qkvd_storage_records")
        assert records == (4000 // 64 + 1) * LAYERS  # pages, and the exact rows behind them
        wait_for(lambda: reserved() == known() > 16 * records, "records are not counted")
        # The index takes more for sessions of one record each.
        for i in range(400):
            small = open_session(daemon, cache, f"small-{i}")
            small.append(0, *small.rows(1))
        wait_for(lambda: reserved() == known() > 400 * 400, "sessions in the index are not counted")


def test_a_batch_larger_than_memory(start):
    """Layers that are cold, and each of which fits into memory, together do not: they are attended one after the other."""
    with start("--memory-budget", "4MiB", "--ema-every", "0", "--calibrate-tokens", "0",
               "--storage-read-ahead", "0") as daemon:
        caches = [Cache(daemon.stub(), f"s{i}", layers=1, recent_window=0, durability=SYNC, seed=i) for i in range(8)]
        for cache in caches:
            for position in range(0, 28672, 2048):
                cache.append(position, *cache.rows(2048))
        queries = [cache.queries(2) for cache in caches]
        alone = [cache.attend(28671, q) for cache, q in zip(caches, queries)]
        assert sum(cache.info().bytes_stored for cache in caches) > 5 << 20
        for _ in range(2):
            items = [cache.item(28671, q=q) for cache, q in zip(caches, queries)]
            results = daemon.stub().Attend(kv.AttendRequest(items=items), timeout=60).results
            for result, (out, lse) in zip(results, alone):
                assert result.status.code == 0, result.status
                assert_close(array_of(result.out), out)
                assert_close(array_of(result.lse), lse)


def test_segments_are_preallocated(start, tmp_path):
    with start() as daemon:
        fill(open_cache(daemon), 300)
        first = tmp_path / "data" / "segment-0000000000000001.qkv"
        assert first.stat().st_size == first.stat().st_blocks * 512 == 4 << 20
    assert first.stat().st_size < 1 << 20  # sealed: the rest is cut off


def test_appends_wait_for_the_disk(start):
    """More comes than memory holds before any of it is durable: requests wait, and that is told."""
    with start("--memory-budget", "2MiB", "--memory-high", "1", "--memory-low", "1", "--storage-dirty", "1MiB",
               "--ema-every", "0", "--calibrate-tokens", "0") as daemon:
        cache = open_cache(daemon, ASYNC, bits_k=8, bits_v=8)
        position = 0

        def held_back():
            nonlocal position
            fill(cache, 8192, position)
            position += 8192
            assert daemon.metric("qkvd_storage_dirty_bytes") <= 1 << 20
            return daemon.metric("qkvd_storage_waits_total") > 0
        wait_for(held_back, "nothing is held back")
        assert list(cache.info().lengths) == [position] * LAYERS
        assert rows(cache, 100)[0].shape[0] == 100


def test_a_long_attend_keeps_nobody_from_memory(start):
    """Rows and pages that it reads are passed over where memory is made of others'."""
    with start("--memory-budget", "64MiB", "--threads", "1", *ADMIN) as daemon:
        stub = daemon.stub()
        shape = {"layers": 1, "kv_heads": 1, "q_heads": 1, "key_dim": 64, "value_dim": 64, "durability": ASYNC}
        exact = Cache(stub, "exact", recent_window=1 << 20, **shape)
        coded = Cache(stub, "coded", recent_window=0, **shape)
        other = Cache(stub, "other", recent_window=1 << 20, **shape)
        for cache in (exact, coded):
            for position in range(0, 16000, 4000):
                cache.append(position, *cache.rows(4000))
        items = [cache.item(16000, q=cache.queries(100_000)) for cache in (exact, coded)]  # a minute of a thread
        attend = stub.Attend.future(kv.AttendRequest(items=items), timeout=TIMEOUT)
        wait_for(lambda: attend_runs(daemon) > 0, "the attend has not begun")
        for position in range(0, 200_000, 4000):  # 100 MB
            other.append(position, *other.rows(4000))
        assert not attend.done()
        attend.cancel()


def test_a_session_does_not_expire_during_an_attend(start):
    with start("--threads", "1") as daemon:
        stub = daemon.stub()
        shape = {"layers": 1, "kv_heads": 1, "q_heads": 1, "key_dim": 64, "value_dim": 64, "durability": ASYNC}
        long, brief = Cache(stub, "long", **shape), Cache(stub, "brief", **shape)
        for position in range(0, 64000, 4000):
            long.append(position, *long.rows(4000))
        for cache in (long, brief):
            stub.Touch(kv.TouchRequest(session=cache.name, ttl_ms=2000))
        item = long.item(64000, q=long.queries(100_000))  # takes long on any machine
        attend = stub.Attend.future(kv.AttendRequest(items=[item]), timeout=TIMEOUT)
        wait_for(lambda: daemon.metric("qkvd_sessions_expired_total") == 1, "the end of the other session")
        time.sleep(2)
        assert long.info().lengths[0] == 64000 and not attend.done()
        attend.cancel()
        wait_for(lambda: daemon.metric("qkvd_sessions_expired_total") == 2, "the end of the session")


def test_a_refused_append_leaves_nothing_reserved(start):
    """Other rows at positions that only the disk has, and more behind them: refused, and their memory is free again."""
    with start() as daemon:
        cache = open_cache(daemon)
        fill(cache, 300)
        k, v = cache.fetch(range=tensor_pb2.TokenRange(begin=0, end=256))
    with start() as daemon:
        reopen(daemon, cache)
        least = daemon.metric("qkvd_kv_reserved_bytes")  # of a start perhaps, which gives some back yet
        more_k, more_v = cache.rows(200)
        for wrong in (0, 100, 255):
            other = k.copy()
            other[wrong] += 1
            with refused(grpc.StatusCode.ALREADY_EXISTS):
                cache.append(0, np.concatenate((other, more_k)), np.concatenate((v, more_v)))
            wait_for(lambda: daemon.metric("qkvd_kv_reserved_bytes") <= least, "memory is left reserved")
            least = daemon.metric("qkvd_kv_reserved_bytes")
        assert list(cache.info().lengths) == [300] * LAYERS


def test_what_has_expired_stays_away(start):
    with start() as daemon:
        cache = open_cache(daemon)
        fill(cache, 300)
        cache.stub.Touch(kv.TouchRequest(session="s", ttl_ms=1))
        wait_for(lambda: daemon.metric("qkvd_sessions_expired_total") == 1, "it does not expire")
        daemon.kill()
    with start() as daemon:
        with refused(grpc.StatusCode.NOT_FOUND, "s"):
            reopen(daemon, cache).info()
        assert daemon.metric("qkvd_storage_records") == 0


def test_truncation_and_closing_hold_after_a_kill(start):
    with start() as daemon:
        kept, closed = open_cache(daemon, name="kept"), open_cache(daemon, name="closed")
        fill(kept, 300)
        fill(closed, 300)
        kept.stub.Truncate(kv.TruncateRequest(session="kept", position=100))
        kept.stub.CloseSession(kv.CloseSessionRequest(session="closed"))
        before = rows(kept, 100)
        daemon.kill()
    with start() as daemon:
        reopen(daemon, kept)
        assert list(kept.info().lengths) == [100] * LAYERS
        assert_same_rows(before, rows(kept, 100))
        with refused(grpc.StatusCode.NOT_FOUND, "closed"):
            kept.stub.GetSession(kv.GetSessionRequest(session="closed"))
        fill(kept, 100, position=100)
        daemon.kill()
    with start() as daemon:
        assert list(reopen(daemon, kept).info().lengths) == [200] * LAYERS


def test_full_precision_comes_back(start):
    with start() as daemon:
        cache = open_cache(daemon)
        fill(cache, 300)
        before = rows(cache, 256)
        demoted = cache.stub.Demote(kv.DemoteRequest(session="s", bits=1, even=True))
        assert demoted.bytes_freed > 0
        assert not np.array_equal(before[0], rows(cache, 256)[0])
        cache.stub.Prefetch(kv.PrefetchRequest(session="s"))
        assert_same_rows(before, rows(cache, 256))
        cache.stub.Demote(kv.DemoteRequest(session="s", bits=1, even=True))
        daemon.kill()
    with start() as daemon:
        assert_same_rows(before, rows(reopen(daemon, cache), 256))


def assert_as_never_demoted(daemon, cache, end):
    """By another session that got the same rows."""
    other = open_cache(daemon, name="other")
    for begin in range(0, end + 64, 64):
        fill(other, 64, position=begin)
    for layer in range(LAYERS):
        assert_same_rows(rows(other, end, layer), rows(cache, end, layer))


def test_what_is_demoted_at_once_comes_back(start):
    """Demote waits until the disk has the planes that go."""
    with start() as daemon:
        cache = open_cache(daemon, ASYNC)
        demoted = []
        for begin in range(0, 512, 64):
            fill(cache, 64, position=begin)
            demoted.append(cache.stub.Demote(kv.DemoteRequest(session="s", bits=1, even=True)).pages)
        assert demoted == [0] + 7 * [LAYERS]  # one page of each layer, but for the first 64 tokens, which are recent
        cache.stub.Prefetch(kv.PrefetchRequest(session="s"))
        assert_as_never_demoted(daemon, cache, 448)


def test_the_background_demotes_what_the_disk_has(start):
    """What was too early to be demoted, as the disk had not got it yet, is demoted later, and comes back."""
    with start("--tier-bits", "1") as daemon:
        cache = open_cache(daemon, ASYNC)
        for begin in range(0, 2048, 64):
            fill(cache, 64, position=begin)
        full = cache.info().bytes_coded
        wait_for(lambda: cache.info().bytes_coded < 0.6 * full, "nothing was demoted")
    with start("--tier-sinks", "2048") as daemon:  # or what comes back is demoted again
        assert_as_never_demoted(daemon, reopen(daemon, cache), 1984)


def test_a_second_daemon_is_refused(start, tmp_path):
    with start():
        second = subprocess.run([binary("qkvd"), "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data")],
                                capture_output=True, text=True, timeout=PATIENCE, env=clean_environment())
        assert second.returncode != 0
        assert "--data-dir" in second.stderr and "another process" in second.stderr


def test_damage_is_told(start, tmp_path):
    """A flipped bit costs the page that it is in, and nothing else; never wrong rows."""
    with start() as daemon:
        cache = open_cache(daemon, bits_k=8, bits_v=8)
        fill(cache, 400)
        before = [rows(cache, 384, layer) for layer in range(LAYERS)]
    segments = sorted(glob.glob(str(tmp_path / "data" / "segment-*.qkv")))
    with open(segments[0], "r+b") as file:
        file.seek(4096 + 1000)  # in the first record's payload
        byte = file.read(1)[0]
        file.seek(4096 + 1000)
        file.write(bytes([byte ^ 16]))
    with start() as daemon:
        reopen(daemon, cache)
        lost = 0
        for layer in range(LAYERS):
            for begin in range(0, 384, 64):
                try:
                    got = cache.fetch(layers=(layer,), range=tensor_pb2.TokenRange(begin=begin, end=begin + 64))
                except grpc.RpcError as error:
                    assert error.code() == grpc.StatusCode.DATA_LOSS, error
                    assert "truncate to that position" in error.details()
                    lost += 1
                else:
                    assert_same_rows([part[begin:begin + 64] for part in before[layer]], got)
        assert lost == 1
        assert daemon.metric("qkvd_storage_lost_pages_total") == 1
        lines = [line for line in daemon.log_lines() if line["message"] == "a record cannot be read"]
        assert lines and all(line["segment"] == 1 and line["offset"] == 4096 for line in lines)
        cache.stub.Truncate(kv.TruncateRequest(session="s", position=0))  # the way out
        fill(cache, 100)


def test_recovery_tells_what_it_drops(start, tmp_path):
    """A record that is damaged in a segment without a footer: its session ends there, the others do not."""
    with start() as daemon:
        damaged, other = open_cache(daemon, name="damaged"), open_cache(daemon, name="other")
        fill(damaged, 300)
        fill(other, 300)
        before = rows(other, 300)
        daemon.kill()
    (segment,) = [path for path in glob.glob(str(tmp_path / "data" / "segment-*.qkv"))
                  if np.fromfile(path, np.uint8)[4096:].any()]  # the next one may have been made
    content = np.fromfile(segment, np.uint8)
    content[4096 + 1000] ^= 16  # the payload of the first record: layer 0, position 0
    content.tofile(segment)
    with start() as daemon:
        assert list(reopen(daemon, damaged).info().lengths) == [0, 300]
        assert list(reopen(daemon, other).info().lengths) == [300, 300]
        assert_same_rows(before, rows(other, 300))
        assert daemon.metric("qkvd_storage_bad_records_total") == 1
        (line,) = [line for line in daemon.log_lines() if line["message"] == "recovery drops what is no good record"]
        assert line["offset"] == 4096 and f"segment-{line['segment']:016x}.qkv" in segment
        damaged.append(0, *damaged.rows(80))
        before = rows(damaged, 80)
        daemon.kill()
    with start() as daemon:  # what lay behind does not come back behind other rows
        assert list(reopen(daemon, damaged).info().lengths) == [80, 300]
        assert_same_rows(before, rows(damaged, 80))


def test_memory_sessions_overhead(start):
    with start("--durability", "memory") as daemon:
        cache = open_cache(daemon, 0)
        fill(cache, 200)
        info = cache.info()
        assert info.durability == kv.DURABILITY_MEMORY and len(info.durable) == 0 and info.bytes_stored == 0
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "keep", "memory"):
            cache.stub.CloseSession(kv.CloseSessionRequest(session="s", keep=True))
    with start() as daemon, refused(grpc.StatusCode.NOT_FOUND, "s"):
        daemon.stub().GetSession(kv.GetSessionRequest(session="s"))


def test_without_a_directory():
    with Daemon() as daemon, refused(grpc.StatusCode.FAILED_PRECONDITION, "durability is SYNC", "data-dir"):
        open_cache(daemon, SYNC)


def test_pins_and_times_outlive_the_daemon(start):
    with start("--memory-budget", "1MiB", "--memory-high", "1", "--memory-low", "1",
               "--calibrate-tokens", "0") as daemon:
        pinned, timed = open_cache(daemon, ASYNC, "pinned"), open_cache(daemon, ASYNC, "timed")
        fill(pinned, 1000)
        pinned.stub.Pin(kv.PinRequest(session="pinned"))
        timed.stub.Touch(kv.TouchRequest(session="timed", ttl_ms=3600_000))
        for i in range(8):
            fill(open_cache(daemon, ASYNC, f"other-{i}"), 4000)
        assert pinned.info().tokens_cold == 0
        daemon.kill()
    with start() as daemon:
        assert reopen(daemon, pinned).info().pinned and not reopen(daemon, timed).info().pinned
        assert pinned.info().ttl_ms == 0 and timed.info().ttl_ms == 3600_000


def test_a_session_larger_than_memory(start):
    """One layer is four times the budget: attended piece by piece, as it would be in one."""
    queries = np.random.default_rng(5).standard_normal((2, 4, 16)).astype(np.float32)
    tokens = 65536
    def make(daemon, durability):
        cache = Cache(daemon.stub(), "large", layers=1, durability=durability, recent_window=16)
        for position in range(0, tokens, 4096):
            cache.append(position, *cache.rows(4096))
        return cache
    with Daemon("--calibrate-tokens", "0", "--ema-every", "0") as daemon:
        expected = make(daemon, 0).attend(tokens - 2, queries)
    with start("--memory-budget", "1MiB", "--memory-high", "1", "--memory-low", "1", "--ema-every", "0",
               "--calibrate-tokens", "0") as daemon:
        cache = make(daemon, ASYNC)
        wait_for(lambda: cache.info().bytes_stored > 2 << 20, "it is not written")
        out, lse = cache.attend(tokens - 2, queries)
        assert np.abs(out - expected[0]).max() < 1e-5 and np.abs(lse - expected[1]).max() < 1e-5
        assert daemon.metric("qkvd_kv_bytes") <= 1 << 20


def qkvctl(daemon, *arguments):
    done = subprocess.run([binary("qkvctl"), *arguments, "--target", daemon.target, "--json"], capture_output=True,
                          text=True, timeout=PATIENCE, env=clean_environment())
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_qkvctl_storage(start, tmp_path):
    with start("--storage-compact-rate", "0") as daemon:
        kept, closed = open_cache(daemon, name="kept"), open_cache(daemon, name="closed")
        fill(kept, 1000)
        for position in range(0, 60000, 4000):
            fill(closed, 4000, position)
        before = rows(kept, 900)
        status, (storage,), _ = qkvctl(daemon, "storage")
        assert status == 0 and storage["records"] == (15 + 937 + 2) * LAYERS
        assert storage["put_bytes"] >= storage["put_stored_bytes"] > 0 and storage["bad_records"] == 0
        assert len(storage["segments"]) >= 2 and sum(s["records"] for s in storage["segments"]) == storage["records"]
        status, (report,), _ = qkvctl(daemon, "storage", "verify")
        assert status == 0 and report == {"records": storage["records"], "bytes": report["bytes"], "bad": 0}
        kept.stub.CloseSession(kv.CloseSessionRequest(session="closed"))
        status, (freed,), _ = qkvctl(daemon, "storage", "compact")
        assert status == 0 and freed["bytes_freed"] >= 4 << 20
        assert_same_rows(before, rows(kept, 900))
        status, (line,), _ = qkvctl(daemon, "sink", "kept")
        assert status == 0 and line["bytes_freed"] > 0
        status, (session,), _ = qkvctl(daemon, "session", "kept")
        assert session["durability"] == "sync" and session["tokens_cold"] == 1000 * LAYERS
        assert session["durable"] == [1000] * LAYERS
        assert_same_rows(before, rows(kept, 900))
    for segment in glob.glob(str(tmp_path / "data" / "segment-*.qkv")):
        content = np.fromfile(segment, np.uint8)
        end = int.from_bytes(content[-4096 + 32:-4096 + 40].tobytes(), "little")  # where the summary begins
        content[4096 + 600:end:4096] ^= 1
        content.tofile(segment)
    with start() as daemon:
        status, (report,), _ = qkvctl(daemon, "storage", "verify")
        assert status != 0 and report["bad"] >= 1
    with Daemon() as daemon:
        status, _, text = qkvctl(daemon, "storage")
        assert status != 0 and "no data-dir" in text


def test_a_full_disk(start):
    """The longest unused sessions go; pinned ones stay; where none can go, memory serves alone."""
    with start("--storage-budget", "16MiB") as daemon:
        first, second = open_cache(daemon, ASYNC, "first"), open_cache(daemon, ASYNC, "second")
        fill(first, 4000)
        fill(second, 4000)
        second.stub.Pin(kv.PinRequest(session="second"))
        last = open_cache(daemon, ASYNC, "last")
        time.sleep(1.1)  # sessions in use are not deleted
        for position in range(0, 120000, 4000):
            fill(last, 4000, position)
        wait_for(lambda: daemon.metric("qkvd_storage_expelled_sessions_total") >= 1, "no session was deleted")
        with refused(grpc.StatusCode.NOT_FOUND, "first"):
            first.info()
        assert second.info().lengths[0] == 4000
        last.stub.Pin(kv.PinRequest(session="last"))
        for position in range(120000, 160000, 4000):
            fill(last, 4000, position)
        wait_for(lambda: daemon.metric("qkvd_storage_degraded") == 1, "the disk is not full")
        assert rows(last, 100)[0].shape[0] == 100  # and everything is served
        fill(last, 100, 160000)
        synced = open_cache(daemon, SYNC, "synced")
        with refused(grpc.StatusCode.UNAVAILABLE, "not durable", "full"):
            fill(synced, 200)
        assert daemon.metric("qkvd_storage_expelled_sessions_total") == 1
        assert second.info().lengths[0] == 4000


def test_a_start_with_too_little_memory_changes_nothing(start, tmp_path):
    """What sessions take in memory though all of their pages are cold."""
    with start() as daemon:
        cache = Cache(daemon.stub(), "s", layers=64, durability=ASYNC, recent_window=16)
        for i in range(50):
            fill(open_session(daemon, cache, f"s-{i}"), 100)
        fill(cache, 4000)
        before = rows(cache, 1000)
    refusal = subprocess.run([binary("qkvd"), "--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data"),
                              "--memory-budget", "1MiB"],
                             capture_output=True, text=True, timeout=PATIENCE, env=clean_environment())
    assert refusal.returncode != 0
    assert "session s" in refusal.stderr and "memory-budget" in refusal.stderr
    with start() as daemon:
        assert list(reopen(daemon, cache).info().lengths) == [4000] * LAYERS + [0] * 62
        assert_same_rows(before, rows(cache, 1000))


def test_other_defaults_after_a_restart(start):
    """A model is what its registration asked for; what that left to the daemon is the next daemon's to say."""
    with start("--bits-k", "4", "--recent-window", "16") as daemon:
        cache = open_cache(daemon)
        fill(cache, 300)
        policy = cache.info().policy
        assert (policy.bits_k, policy.recent_window) == (4, 16)
        before = rows(cache, 256)
    with start("--bits-k", "3", "--recent-window", "32") as daemon:
        stub = reopen(daemon, cache).stub
        stub.RegisterModel(model_pb2.RegisterModelRequest(model=cache.model))
        model = stub.GetModel(model_pb2.GetModelRequest(name=cache.model.name)).model
        assert (model.policy.bits_k, model.policy.recent_window) == (3, 32)
        assert (cache.info().policy.bits_k, cache.info().policy.recent_window) == (4, 16)  # what it was opened with
        assert_same_rows(before, rows(cache, 256))
        other = model_pb2.Model()
        other.CopyFrom(cache.model)
        other.policy.bits_k = 4
        with refused(grpc.StatusCode.ALREADY_EXISTS, "another policy"):
            stub.RegisterModel(model_pb2.RegisterModelRequest(model=other))


def learnt(seed):
    """A calibration of the models here."""
    with Daemon("--calibrate-tokens", "256") as daemon:
        cache = Cache(daemon.stub(), "s", layers=LAYERS, seed=seed)
        for layer in range(LAYERS):
            k, v = cache.rows(1024)
            cache.append(0, k + 3, v + 3, layer=layer)  # of rows around 0 none would be worth it
        wait_for(lambda: daemon.metric("qkvd_calibrations_total") == 1, "nothing is calibrated")
        request = model_pb2.GetCalibrationRequest(model=cache.model.name)
        return b"".join(piece.chunk for piece in cache.stub.GetCalibration(request))


def test_calibrations_that_no_page_names_go(start, tmp_path):
    first, second = learnt(1), learnt(2)
    assert first != second

    def calibrate(cache, calibration):
        model = model_pb2.Model()
        model.CopyFrom(cache.model)
        model.calibration = calibration
        model.calibration_trusted = True
        cache.stub.RegisterModel(model_pb2.RegisterModelRequest(model=model))

    def journal():
        return open(tmp_path / "data" / "journal.qkv", "rb").read()

    with start("--calibrate-tokens", "0") as daemon:
        old = open_cache(daemon, name="old")
        calibrate(old, first)
        fill(old, 300)
        calibrate(old, second)
        new = open_session(daemon, old, "new")
        fill(new, 300)
        before = [rows(old, 256), rows(new, 256)]
    with start("--calibrate-tokens", "0") as daemon:
        assert_same_rows(before[0], rows(reopen(daemon, old), 256))
        assert_same_rows(before[1], rows(reopen(daemon, new), 256))
        assert first in journal() and second in journal()
        old.stub.CloseSession(kv.CloseSessionRequest(session="old"))
    with start("--calibrate-tokens", "0") as daemon:
        assert first not in journal() and second in journal()
        assert_same_rows(before[1], rows(reopen(daemon, new), 256))
        calibrate(new, first)  # may come again
        fill(new, 300, position=300)
    with start("--calibrate-tokens", "0") as daemon:
        assert first in journal() and second in journal()
        assert_same_rows(before[1], rows(reopen(daemon, new), 256))
        assert list(new.info().lengths) == [600] * LAYERS


def test_tenants_that_are_skipped_do_not_teach(start):
    """Nor do those of their sessions that an earlier daemon has left, which may have taught."""
    with start() as daemon:
        cache = open_cache(daemon)
        fill(cache, 300)
        assert daemon.status().learning_bytes > 0
    with start("--calibrate-skip", "other", "--calibrate-skip", "default") as daemon:
        fill(reopen(daemon, cache), 300, position=300)
        fill(open_session(daemon, cache, "new"), 300)
        assert daemon.status().learning_bytes == 0
