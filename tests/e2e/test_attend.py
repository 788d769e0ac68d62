"""Attend and Decode against attention in float64 over the rows that Fetch gives."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from daemon import Daemon, wait_for
from kv import BF16, FP16, FP32, TIMEOUT, Cache, array_of, assert_close, attention, refused, rounded
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import tensor_pb2
from test_http import ADMIN, attend_runs


def check(cache, position, queries, options=None, **reference):
    """Attends random queries and compares; gives what was compared."""
    q = cache.queries(queries)
    k, v = cache.fetch()
    out, lse = cache.attend(position, q, options=options)
    expected_out, expected_lse = attention(q, k, v, position + (options.causal_offset if options else 0), **reference)
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)
    return out, lse


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("queries", [1, 5])
def test_exact_rows(make_cache, tokens, queries):
    cache = make_cache(recent_window=1000)
    k, v = cache.rows(tokens)
    cache.append(0, k, v)
    position = max(tokens - queries, 0)
    q = cache.queries(queries)
    out, lse = cache.attend(position, q)
    expected_out, expected_lse = attention(q, k, v, position)
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)


def test_precision(make_cache):
    cache = make_cache(recent_window=0)
    cache.append(0, *cache.rows(512))
    q = cache.queries(4)
    exact, lse = cache.attend(511, q)
    assert np.array_equal(exact, cache.attend(511, q, options=kv.AttendOptions(precision="PRECISION_FP32"))[0])
    rough = [cache.attend(511, q, in_floats=False, options=kv.AttendOptions(precision=precision))
             for precision in ("PRECISION_UNSPECIFIED", "PRECISION_INT8", "PRECISION_INT16")]
    errors = [np.linalg.norm(out - exact) / np.linalg.norm(exact) for out, _ in rough]
    assert 0.03 > errors[0] > errors[1] > errors[2] > 0
    for _, other in rough:
        assert_close(other, lse, relative=1e-2)


@pytest.mark.parametrize("bits_k,bits_v", [(1, 1), (2, 4), (4, 2), (3, 3), (8, 8)])
def test_coded_rows(make_cache, bits_k, bits_v):
    cache = make_cache(recent_window=10, bits_k=bits_k, bits_v=bits_v)
    cache.append(0, *cache.rows(300))
    assert cache.info().tokens_coded == 256
    check(cache, 299, 1)
    check(cache, 290, 10)


@pytest.mark.parametrize("kv_heads,q_heads", [(1, 1), (2, 2), (1, 7), (2, 16), (3, 12)])
def test_grouped_queries(make_cache, kv_heads, q_heads):
    cache = make_cache(kv_heads=kv_heads, q_heads=q_heads, recent_window=20)
    cache.append(0, *cache.rows(150))
    check(cache, 147, 3)


@pytest.mark.parametrize("key_dim,value_dim", [(64, 64), (80, 80), (96, 32), (192, 128), (8, 256)])
def test_widths(make_cache, key_dim, value_dim):
    cache = make_cache(key_dim=key_dim, value_dim=value_dim, recent_window=20)
    cache.append(0, *cache.rows(150))
    check(cache, 149, 1)


@pytest.mark.parametrize("window", [1, 10, 64, 100, 1000])
def test_sliding_window(make_cache, window):
    cache = make_cache(recent_window=20)
    cache.append(0, *cache.rows(200))
    check(cache, 150, 40, kv.AttendOptions(sliding_window=window), window=window)


def test_options_of_the_model(make_cache):
    cache = make_cache(recent_window=20, sliding_window=50, soft_cap=2.0, scale=0.7)
    cache.append(0, *cache.rows(200))
    check(cache, 199, 1, window=50, soft_cap=2.0, scale=0.7)


def test_soft_cap_and_scale_of_the_request(make_cache):
    cache = make_cache(recent_window=20)
    cache.append(0, *cache.rows(200))
    check(cache, 199, 1, kv.AttendOptions(soft_cap=1.5, scale=0.9), soft_cap=1.5, scale=0.9)


def test_causal_offset_and_not_causal(make_cache):
    cache = make_cache(recent_window=20)
    cache.append(0, *cache.rows(200))
    check(cache, 100, 8, kv.AttendOptions(causal_offset=50))
    check(cache, 100, 8, kv.AttendOptions(causal_offset=-30))
    check(cache, 0, 8, kv.AttendOptions(not_causal=True), causal=False)


def test_request_options_hold_for_items_without_their_own(make_cache):
    cache = make_cache(recent_window=20)
    k, v = cache.rows(100)
    cache.append(0, k, v)
    q = cache.queries(1)
    plain, own = cache.item(99, q=q, in_floats=False), cache.item(99, q=q, options=kv.AttendOptions(scale=0.1))
    options = kv.AttendOptions(scale=0.9, precision=kv.AttendOptions.PRECISION_FP32)
    answer = cache.stub.Attend(kv.AttendRequest(items=[plain, own], options=options, id=77), timeout=TIMEOUT)
    assert answer.id == 77
    rows = cache.fetch()
    for result, scale in zip(answer.results, (0.9, 0.1)):
        assert_close(array_of(result.out), attention(q, *rows, 99, scale=scale)[0])


@pytest.mark.parametrize("begin,end", [(0, 64), (10, 20), (63, 65), (100, 0), (0, 1), (150, 199)])
def test_token_range(make_cache, begin, end):
    cache = make_cache(recent_window=20)
    cache.append(0, *cache.rows(200))
    k, v = cache.fetch()
    q = cache.queries(2)
    out, lse = cache.attend(198, q, options=kv.AttendOptions(range=tensor_pb2.TokenRange(begin=begin, end=end)))
    expected = attention(q, k[begin:end or None], v[begin:end or None], 198, key_position=begin)
    assert_close(out, expected[0])
    assert_close(lse, expected[1])


@pytest.mark.parametrize("cut", [1, 64, 100, 180, 199])
def test_partials_of_two_ranges_merge_to_the_whole(make_cache, cut):
    cache = make_cache(recent_window=20)
    cache.append(0, *cache.rows(200))
    q = cache.queries(1)
    whole_out, whole_lse = cache.attend(199, q)
    parts = [cache.attend(199, q, options=kv.AttendOptions(range=tensor_pb2.TokenRange(begin=begin, end=end)))
             for begin, end in ((0, cut), (cut, 0))]
    lse = np.logaddexp(parts[0][1].astype(np.float64), parts[1][1].astype(np.float64))
    out = sum(out.astype(np.float64) * np.exp(part_lse - lse)[:, :, None] for out, part_lse in parts)
    assert_close(lse, whole_lse)
    assert_close(out, whole_out)


def test_query_that_sees_nothing(make_cache):
    cache = make_cache(recent_window=20)
    q = cache.queries(2)
    out, lse = cache.attend(0, q)  # an empty layer
    assert np.all(out == 0) and np.all(np.isneginf(lse))
    cache.append(0, *cache.rows(100))
    out, lse = cache.attend(10, q, options=kv.AttendOptions(range=tensor_pb2.TokenRange(begin=11, end=50)))
    assert np.all(out[0] == 0) and np.all(np.isneginf(lse[0]))
    assert np.all(np.isfinite(lse[1]))


def test_large_scores_stay_finite(make_cache):
    cache = make_cache(recent_window=20)
    k, v = cache.rows(100)
    cache.append(0, k * 300, v)
    q = cache.queries(1) * 100
    out, lse = cache.attend(99, q)
    assert np.all(np.isfinite(out)) and np.all(np.isfinite(lse))
    fetched = cache.fetch()
    assert_close(lse, attention(q, *fetched, 99)[1], 1e-4)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_out_dtype_and_query_dtype(make_cache, dtype):
    cache = make_cache(recent_window=20)
    cache.append(0, *cache.rows(100))
    q = cache.queries(1)
    item = cache.item(99, q=q, dtype=dtype)
    result = cache.stub.Attend(kv.AttendRequest(items=[item], out_dtype=dtype), timeout=TIMEOUT).results[0]
    assert result.out.dtype == dtype and result.lse.dtype == FP32
    expected, _ = cache.attend(99, rounded(q, dtype))
    assert np.array_equal(array_of(result.out), rounded(expected, dtype))


def test_append_and_attend_in_one_item(make_cache):
    cache = make_cache(recent_window=20)
    k, v = cache.rows(100)
    q = cache.queries(4)
    request = kv.AttendRequest(items=[cache.item(0, k[:96], v[:96], q=None)])
    assert cache.stub.Attend(request, timeout=TIMEOUT).results[0].length == 96
    request = kv.AttendRequest(items=[cache.item(96, k[96:], v[96:], q=q)])
    result = cache.stub.Attend(request, timeout=TIMEOUT).results[0]
    assert result.length == 100
    assert_close(array_of(result.out), attention(q, *cache.fetch(), 96)[0])


def test_batch_over_sessions_of_one_layer(make_cache):
    caches = [make_cache(recent_window=20, seed=index, kv_heads=1 + index % 3, q_heads=6) for index in range(12)]
    queries = []
    for index, cache in enumerate(caches):
        cache.append(0, *cache.rows(10 + 30 * index))
        queries.append(cache.queries(1))
    items = [cache.item(9 + 30 * index, q=q) for index, (cache, q) in enumerate(zip(caches, queries))]
    answer = caches[0].stub.Attend(kv.AttendRequest(items=items), timeout=TIMEOUT)
    for index, (cache, q, result) in enumerate(zip(caches, queries, answer.results)):
        assert_close(array_of(result.out), attention(q, *cache.fetch(), 9 + 30 * index)[0])


def test_batches_in_any_order_during_appends(make_cache):
    """Sessions named several times and in opposite orders, while others append to them: no call waits for ever."""
    caches = [make_cache(recent_window=20, kv_heads=4, q_heads=16, key_dim=64, value_dim=64) for _ in range(2)]
    rows = [cache.rows(2048) for cache in caches]
    for cache, (k, v) in zip(caches, rows):
        cache.append(0, k[:512], v[:512])
    stop = threading.Event()

    def attend(order):
        items = [caches[index].item(511, q=caches[index].queries(16)) for index in order]
        while not stop.is_set():
            answer = caches[0].stub.Attend(kv.AttendRequest(items=items), timeout=30)
            assert all(result.status.code == 0 for result in answer.results)

    def append(index):
        k, v = rows[index]
        for position in range(512, 2048, 4):
            end = position + 4
            caches[index].stub.Append(iter([kv.AppendRequest(items=[caches[index].item(
                position, k[position:end], v[position:end])])]), timeout=30)

    with ThreadPoolExecutor(6) as pool:
        readers = [pool.submit(attend, order) for order in ([0, 1, 0, 1], [1, 0, 1, 0]) * 2]
        writers = [pool.submit(append, index) for index in range(2)]
        try:
            for writer in writers:
                writer.result()
        finally:
            stop.set()
        for reader in readers:
            reader.result()


def test_items_of_a_batch_fail_one_by_one(make_cache):
    cache = make_cache(recent_window=20)
    cache.append(0, *cache.rows(10))
    q = cache.queries(1)
    nobody = cache.item(9, q=q)
    nobody.session = "nobody"
    items = [cache.item(9, q=q), nobody, cache.item(20, *cache.rows(1)), cache.item(9, q=q, layer=1)]
    results = cache.stub.Attend(kv.AttendRequest(items=items), timeout=TIMEOUT).results
    codes = [result.status.code for result in results]
    assert codes == [0, grpc.StatusCode.NOT_FOUND.value[0], grpc.StatusCode.FAILED_PRECONDITION.value[0], 0]
    assert "nobody" in results[1].status.message and "items[1]" in results[1].status.message
    assert "position is 20" in results[2].status.message
    with refused(grpc.StatusCode.NOT_FOUND, "items[0]", "nobody"):
        cache.stub.Attend(kv.AttendRequest(items=[nobody, items[2]]), timeout=TIMEOUT)


def test_the_same_call_gives_the_same_bits(make_cache):
    cache = make_cache(recent_window=20, kv_heads=4, q_heads=8)
    cache.append(0, *cache.rows(500))
    request = kv.AttendRequest(items=[cache.item(499, q=cache.queries(1))])
    answers = {cache.stub.Attend(request, timeout=TIMEOUT).SerializeToString(deterministic=True) for _ in range(10)}
    assert len(answers) == 1


def test_decode_stream(make_cache):
    cache = make_cache(layers=2, recent_window=8)
    tokens = 150
    rows = [cache.rows(tokens) for _ in range(2)]
    queries = [cache.queries(tokens) for _ in range(2)]

    def requests():
        for token in range(tokens):
            for layer in (0, 1):
                k, v = rows[layer]
                item = cache.item(token, k[token:token + 1], v[token:token + 1], q=queries[layer][token:token + 1],
                                  layer=layer)
                yield kv.AttendRequest(items=[item], id=2 * token + layer)

    answers = list(cache.stub.Decode(requests(), timeout=TIMEOUT))
    assert [answer.id for answer in answers] == list(range(2 * tokens))
    for layer in (0, 1):
        results = [answer.results[0] for answer in answers[layer::2]]
        assert [result.length for result in results] == list(range(1, tokens + 1))
        # Up to token 70 every row was still exact when it was attended.
        k, v = rows[layer]
        expected, _ = attention(queries[layer][:70], k[:70], v[:70], 0)
        assert_close(np.concatenate([array_of(result.out) for result in results[:70]]), expected)
        # The last step saw what Fetch gives now.
        expected, _ = attention(queries[layer][-1:], *cache.fetch(layers=(layer,)), tokens - 1)
        assert_close(array_of(results[-1].out), expected)


@pytest.fixture
def long_attend():
    """Starts attends of 25,000 queries, seconds of a thread, over 16,000 rows: (cache, queries, call)."""
    with Daemon("--threads", "1", *ADMIN) as daemon:
        cache = Cache(daemon.stub(), "long", recent_window=0, layers=1, kv_heads=1, q_heads=1, key_dim=64, value_dim=64)
        for position in range(0, 16000, 4000):
            cache.append(position, *cache.rows(4000))

        def begin(**fields):
            q = cache.queries(25_000)
            request = kv.AttendRequest(items=[cache.item(16000, q=q, **fields)])
            call = cache.stub.Attend.future(request, timeout=TIMEOUT)
            wait_for(lambda: attend_runs(daemon) > 0, "the attend has not begun")
            return cache, q, call

        yield begin


def test_a_long_attend_sees_what_was_there_at_first(long_attend):
    cache, q, call = long_attend(options=kv.AttendOptions(not_causal=True))
    cache.append(16000, *cache.rows(100))
    assert not call.done()
    result = call.result().results[0]
    assert result.length == 16000
    before = kv.AttendOptions(not_causal=True, range={"end": 16000})
    for part in (slice(0, 50), slice(-50, None)):
        out, lse = cache.attend(16000, q[part], options=before)
        assert_close(array_of(result.out)[part], out)
        assert_close(array_of(result.lse)[part], lse)


def test_an_item_of_a_later_turn_sees_what_was_there_then():
    """Item 1's first turn comes when item 0 is done: its length and its results are those of that moment."""
    with Daemon("--threads", "1", *ADMIN) as daemon:
        stub = daemon.stub()
        shape = {"recent_window": 0, "layers": 1, "kv_heads": 1, "q_heads": 1, "key_dim": 64, "value_dim": 64}
        long, brief = Cache(stub, "long", **shape), Cache(stub, "brief", seed=1, **shape)
        for position in range(0, 16000, 4000):
            long.append(position, *long.rows(4000))
        brief.append(0, *brief.rows(100))
        q, all_rows = brief.queries(1), kv.AttendOptions(not_causal=True)
        items = [long.item(16000, q=long.queries(25_000)), brief.item(0, q=q, options=all_rows)]
        call = stub.Attend.future(kv.AttendRequest(items=items), timeout=TIMEOUT)
        wait_for(lambda: attend_runs(daemon) > 0, "the attend has not begun")
        brief.append(100, *brief.rows(100))
        assert not call.done()
        result = call.result().results[1]
        assert result.length == 200
        out, lse = brief.attend(0, q, options=all_rows)
        assert_close(array_of(result.out), out)
        assert_close(array_of(result.lse), lse)


def test_a_truncation_ends_a_long_attend(long_attend):
    cache, _, call = long_attend()
    cache.stub.Truncate(kv.TruncateRequest(session=cache.name, position=8000), timeout=TIMEOUT)
    assert not call.done()
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "items[0].session was truncated during the attend"):
        call.result()


def test_decode_stream_goes_on_after_an_item_that_fails(make_cache):
    cache = make_cache(recent_window=20)
    k, v = cache.rows(2)
    q = cache.queries(1)
    requests = [kv.AttendRequest(items=[cache.item(5, k[:1], v[:1], q=q)], id=1),
                kv.AttendRequest(items=[cache.item(0, k[:1], v[:1], q=q)], id=2),
                kv.AttendRequest(items=[cache.item(1, k[1:], v[1:], q=q)], id=3)]
    answers = list(cache.stub.Decode(iter(requests), timeout=TIMEOUT))
    assert [answer.id for answer in answers] == [1, 2, 3]
    assert [answer.results[0].status.code for answer in answers] == [9, 0, 0]
    assert cache.info().lengths[0] == 2
