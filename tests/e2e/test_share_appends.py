"""Appends of tokens that another session holds take its pages, through the real daemon."""

import copy

import numpy as np
import pytest

from daemon import Daemon
from kv import TIMEOUT, Cache, Tenant
from qkv.v1 import kv_cache_pb2 as kv

LAYERS = 2


def prompt(count, seed=1):
    return [int(x) for x in np.random.default_rng(seed).integers(0, 1 << 32, count)]


def another(cache, name, **fields):
    made = copy.copy(cache)
    made.name = name
    made.stub = Tenant(cache.stub, fields.get("tenant", ""))
    made.stub.OpenSession(kv.OpenSessionRequest(session=name, model=cache.model.name, **fields), timeout=TIMEOUT)
    return made


def fill(cache, ids, begin=0, end=None, rows=None, step=10000):
    """Rows, random unless given, with the ids of each item."""
    end = len(ids) if end is None else end
    k, v = rows or cache.rows(end)
    for position in range(begin, end, step):
        part = slice(position, min(position + step, end))
        for layer in range(LAYERS):
            cache.append(position, k[part], v[part], layer=layer, token_ids=ids[part])
    return k, v


def rows_of(cache):
    return [array for layer in range(LAYERS) for array in cache.fetch(layers=(layer,))]


def same_until(a, b):
    """Tokens from 0 on whose rows are the same."""
    different = [np.flatnonzero((x[:len(y)] != y[:len(x)]).any(axis=(1, 2))) for x, y in zip(rows_of(a), rows_of(b))]
    return min([*(int(d[0]) for d in different if len(d)), 1 << 60])


def close(cache):
    cache.stub.CloseSession(kv.CloseSessionRequest(session=cache.name), timeout=TIMEOUT)


def shared(daemon):
    return daemon.metric("qkvd_append_shared_pages_total")


@pytest.mark.parametrize("step", [10000, 300, 64])
def test_pages_are_taken(daemon, make_cache, step):
    cache = make_cache(layers=LAYERS)
    ids = prompt(1000)
    fill(cache, ids)
    before = shared(daemon)
    other = another(cache, cache.name + "-other")
    rows = fill(other, ids, end=900, step=step)
    # All pages that are sealed: those behind which the recent window of 64 lies. The last step's alone begin anew.
    sealed = (900 - 64) // 64
    assert shared(daemon) - before == sealed * LAYERS
    assert same_until(cache, other) == sealed * 64
    # The rows may be sent again, though the pages are not theirs; the exact ones are compared.
    fill(other, ids, end=900, rows=rows)
    assert list(other.info().lengths) == [900] * LAYERS
    # Both go on, and either may be closed first.
    after = rows_of(other)
    close(cache)
    for x, y in zip(after, rows_of(other)):
        assert np.array_equal(x, y)
    third = another(cache, cache.name + "-third")
    fill(third, ids, end=900)
    assert same_until(third, other) == sealed * 64


def test_only_pages_of_the_same_tokens_and_code(daemon, make_cache):
    cache = make_cache(layers=LAYERS, shared=True)
    ids = prompt(600)
    rows = fill(cache, ids)
    before = shared(daemon)
    changed = ids[:200] + [ids[200] ^ 1] + ids[201:]
    other = another(cache, cache.name + "-changed")
    fill(other, changed)
    assert shared(daemon) - before == 3 * LAYERS and same_until(cache, other) == 192
    for i, fields in enumerate((dict(tenant="t"), dict(salt=b"s"), dict(purpose=kv.PURPOSE_FETCH),
                                dict(max_attention_error=0.1))):
        fill(another(cache, f"{cache.name}-{i}", **fields), ids)
        assert shared(daemon) - before == 3 * LAYERS, fields
    # Without ids, and with fewer than a page of them, nothing is looked for.
    plain = another(cache, cache.name + "-plain")
    for layer in range(LAYERS):
        plain.append(0, *rows, layer=layer)
    assert shared(daemon) - before == 3 * LAYERS


def test_truncated_holders_give_nothing(daemon, make_cache):
    cache = make_cache(layers=LAYERS)
    ids = prompt(600)
    fill(cache, ids)
    cache.stub.Truncate(kv.TruncateRequest(session=cache.name, position=130), timeout=TIMEOUT)
    before = shared(daemon)
    fill(another(cache, cache.name + "-other"), ids)
    assert shared(daemon) - before == 2 * LAYERS


def test_memory_is_held_once(daemon, make_cache):
    cache = make_cache(layers=LAYERS, kv_heads=4, q_heads=4, key_dim=64, value_dim=64, recent_window=0)
    ids = prompt(4096)
    before = daemon.metric("qkvd_kv_bytes")
    fill(cache, ids)
    middle = daemon.metric("qkvd_kv_bytes")
    # The same policy: what is exact is the open page alone.
    fill(another(cache, cache.name + "-other", policy=cache.info().policy), ids)
    after = daemon.metric("qkvd_kv_bytes")
    assert after - middle < 0.05 * (middle - before), (before, middle, after)


def test_the_option(make_cache):
    with Daemon("--separate-appends") as daemon:
        cache = Cache(daemon.stub(), "s", layers=LAYERS)
        ids = prompt(600)
        fill(cache, ids)
        other = another(cache, "other")
        fill(other, ids)
        assert shared(daemon) == 0 and same_until(cache, other) == 0


def test_on_the_ssd(tmp_path):
    """Each session has records of its own: what one took survives the other, and the process."""
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-segment", "4MiB", "--calibrate-tokens", "0")
    with Daemon(*arguments) as daemon:
        cache = Cache(daemon.stub(), "s", layers=LAYERS, durability=kv.DURABILITY_SYNC)
        ids = prompt(1280)
        fill(cache, ids)
        other = another(cache, "other", durability=kv.DURABILITY_SYNC)
        fill(other, ids)
        assert shared(daemon) == 19 * LAYERS
        before = [x[:19 * 64] for x in rows_of(other)]
        close(cache)
        other.stub.CloseSession(kv.CloseSessionRequest(session="other", keep=True), timeout=TIMEOUT)
        for x, y in zip(rows_of(other), before):
            assert np.array_equal(x[:19 * 64], y)
        daemon.kill()
    with Daemon(*arguments) as daemon:
        other.stub = daemon.stub()
        for x, y in zip(rows_of(other), before):
            assert np.array_equal(x[:19 * 64], y)


def test_sessions_larger_than_memory(tmp_path):
    """Taken pages leave memory and come back as others do."""
    with Daemon("--data-dir", str(tmp_path / "data"), "--storage-segment", "4MiB", "--memory-budget", "16MiB",
                "--calibrate-tokens", "0") as daemon:
        caches = []
        for i in range(12):
            cache = Cache(daemon.stub(), f"s{i}", layers=LAYERS, kv_heads=4, key_dim=64, value_dim=64, seed=i)
            other = another(cache, f"t{i}")
            rows = fill(cache, prompt(3200, i), step=640)
            # Which pages are still in memory depends on the disk: the others are coded from the same rows, alike.
            fill(other, prompt(3200, i), rows=rows, step=640)
            caches.append((cache, other))
        # The first two sessions fit into memory together, so all of their pages are taken.
        assert daemon.metric("qkvd_storage_evicted_bytes_total") > 0 and shared(daemon) >= LAYERS * 49
        for cache, other in caches:
            assert list(other.info().lengths) == [3200] * LAYERS
            assert same_until(cache, other) == 1 << 60
