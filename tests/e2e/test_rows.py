"""Rows in and out: element types, strides, idempotence, exact and coded rows, RoPE."""

import grpc
import numpy as np
import pytest

from kv import (AFTER, BEFORE, BF16, FP16, FP32, TIMEOUT, assert_close, attention, encode, refused, rope_half, rounded)
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2, tensor_pb2


@pytest.mark.parametrize("sent", [FP32, FP16, BF16])
@pytest.mark.parametrize("kept", [FP32, FP16, BF16])
def test_exact_rows_come_back_as_they_were(make_cache, sent, kept):
    cache = make_cache(dtype=kept, recent_window=1000)
    k, v = cache.rows(70)
    assert cache.append(0, k, v, dtype=sent).tokens == 70
    for array, fetched in zip((k, v), cache.fetch()):
        assert np.array_equal(fetched, rounded(rounded(array, sent), kept))


@pytest.mark.parametrize("dtype", [FP16, BF16, 0])
def test_fetch_converts(make_cache, dtype):
    cache = make_cache(dtype=FP16, recent_window=1000)
    k, v = cache.rows(5)
    cache.append(0, k, v)
    fetched, _ = cache.fetch(dtype=dtype)
    assert np.array_equal(fetched, rounded(rounded(k, FP16), dtype or FP16))


# Largest relative squared error of a coded row at each depth (Lloyd-Max on a Gaussian) and some.
BOUNDS = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.0095, 8: 0.0001}


@pytest.mark.parametrize("bits", BOUNDS)
def test_coded_rows_come_back_within_the_codes_error(make_cache, bits):
    cache = make_cache(recent_window=0, bits_k=bits, bits_v=bits, key_dim=128, value_dim=96)
    k, v = cache.rows(256)
    cache.append(0, k, v)
    assert cache.info().tokens_exact == 0
    for array, fetched in zip((k, v), cache.fetch()):
        error = np.sum((array - fetched) ** 2) / np.sum(array ** 2)
        assert error < BOUNDS[bits] * 1.15
        assert bits == 8 or error > BOUNDS[bits] * 0.8


def test_fewer_bits_are_less_memory(make_cache):
    sizes = []
    for bits in (1, 2, 3, 4, 8):
        cache = make_cache(recent_window=0, bits_k=bits, bits_v=bits, key_dim=128, value_dim=128)
        cache.append(0, *cache.rows(256))
        info = cache.info()
        sizes.append(info.bytes_coded)
        assert bits <= info.bits_per_coordinate < bits + 0.4  # four sinks of 256 tokens take 0.14
    assert sizes == sorted(sizes)


def strided(array, dtype=FP32, tokens_gap=0, heads_gap=0):
    """A tensor message over `array` inside a larger buffer, with gaps between tokens and heads."""
    tokens, heads, dim = array.shape
    room = np.full((tokens, heads + heads_gap, dim + tokens_gap), 7, np.float32)
    room[:, :heads, :dim] = array
    encoded = encode(room, dtype)
    return tensor_pb2.Tensor(dtype=dtype, dims=array.shape, strides=encoded.strides, data=encoded.tobytes())


@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_strides(make_cache, dtype):
    cache = make_cache(recent_window=1000)
    k, v = cache.rows(9)
    item = cache.item(0)
    item.k.CopyFrom(strided(k, dtype, tokens_gap=8))
    # Heads first in the sender's memory.
    heads_first = np.ascontiguousarray(encode(v, dtype).transpose(1, 0, 2))
    view = heads_first.transpose(1, 0, 2)
    item.v.CopyFrom(tensor_pb2.Tensor(dtype=dtype, dims=v.shape, strides=view.strides, data=heads_first.tobytes()))
    cache.stub.Append(iter([kv.AppendRequest(items=[item])]), timeout=TIMEOUT)
    fetched_k, fetched_v = cache.fetch()
    assert np.array_equal(fetched_k, rounded(k, dtype))
    assert np.array_equal(fetched_v, rounded(v, dtype))
    # Queries too, and a stride of 0 that repeats a row.
    q = cache.queries(1)
    item = cache.item(8)
    repeated = np.ascontiguousarray(q, "<f4")
    item.q.CopyFrom(tensor_pb2.Tensor(dtype=FP32, dims=[3, 4, 16], strides=[0, 64, 4], data=repeated.tobytes()))
    item.options.not_causal = True
    result = cache.stub.Attend(kv.AttendRequest(items=[item]), timeout=TIMEOUT).results[0]
    out = np.frombuffer(result.out.data, "<f4").reshape(3, 4, 16)
    assert np.array_equal(out[0], out[1]) and np.array_equal(out[0], out[2])
    expected, _ = attention(q, fetched_k, fetched_v, 0, causal=False)
    assert_close(out[:1], expected)


def test_the_same_rows_again_are_acknowledged(make_cache):
    cache = make_cache(recent_window=16)
    k, v = cache.rows(200)
    assert cache.append(0, k, v).tokens == 200
    state = cache.state()
    assert cache.append(0, k, v).tokens == 0
    assert cache.append(50, k[50:150], v[50:150]).tokens == 0
    assert cache.state() == state
    more_k, more_v = cache.rows(10)
    answer = cache.append(190, np.concatenate([k[190:], more_k]), np.concatenate([v[190:], more_v]))
    assert answer.tokens == 10
    assert cache.info().lengths[0] == 210


@pytest.mark.parametrize("position", [10, 120, 195])
def test_other_rows_at_a_held_position_are_refused(make_cache, position):
    cache = make_cache(recent_window=16)
    k, v = cache.rows(200)
    cache.append(0, k, v)
    state, rows = cache.state(), cache.fetch()
    other = k[position:position + 2].copy()
    other[1] = -other[1]
    with refused(grpc.StatusCode.ALREADY_EXISTS, f"{position + 1}"):
        cache.append(position, other, v[position:position + 2])
    assert cache.state() == state
    for before, after in zip(rows, cache.fetch()):
        assert np.array_equal(before, after)


def test_append_stream_of_many_messages_and_layers(make_cache):
    cache = make_cache(layers=4, recent_window=1000)
    rows = [cache.rows(60) for _ in range(4)]

    def requests():
        for begin in range(0, 60, 20):
            yield kv.AppendRequest(items=[
                cache.item(begin, k[begin:begin + 20], v[begin:begin + 20], layer=layer)
                for layer, (k, v) in enumerate(rows)])

    answer = cache.stub.Append(requests(), timeout=TIMEOUT)
    assert (answer.items, answer.tokens) == (12, 240)
    for layer, (k, v) in enumerate(rows):
        fetched_k, fetched_v = cache.fetch(layers=(layer,))
        assert np.array_equal(fetched_k, k) and np.array_equal(fetched_v, v)


def test_append_stops_at_the_first_item_that_fails(make_cache):
    cache = make_cache(layers=3, recent_window=1000)
    k, v = cache.rows(4)
    good = kv.AppendRequest(items=[cache.item(0, k, v)])
    bad = kv.AppendRequest(items=[cache.item(0, k, v, layer=1), cache.item(9, k, v, layer=2), cache.item(4, k, v)])
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "message 1", "items[1]", "position is 9", "expected position is 0"):
        cache.stub.Append(iter([good, bad]), timeout=TIMEOUT)
    assert list(cache.info().lengths) == [4, 4, 0]


def test_first_position(make_cache):
    cache = make_cache(first_position=1000, recent_window=0)
    k, v = cache.rows(70)
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "1000"):
        cache.append(1001, k, v)
    cache.append(1000, k, v)
    assert cache.info().lengths[0] == 1070
    q = cache.queries(1)
    fetched_k, fetched_v = cache.fetch()
    out, lse = cache.attend(1069, q)
    expected = attention(q, fetched_k, fetched_v, 1069, key_position=1000)
    assert_close(out, expected[0])
    assert_close(lse, expected[1])


ROPE = model_pb2.Rope(theta=10000)


def test_rows_before_rope_are_turned_to_their_position(make_cache):
    before, after = (make_cache(recent_window=1000, rope=ROPE) for _ in range(2))
    k, v = before.rows(100)
    before.append(0, k, v, k_rope=BEFORE)
    after.append(0, rope_half(k, 0, 10000).astype(np.float32), v, k_rope=AFTER)
    turned = after.fetch()[0]
    assert_close(before.fetch()[0], turned, 1e-6)
    assert_close(before.fetch(rope=BEFORE)[0], k, 1e-5)
    q = before.queries(2)
    turned_q = rope_half(q, 98, 10000).astype(np.float32)
    out, lse = before.attend(98, q, q_rope=BEFORE)
    out_after, lse_after = after.attend(98, turned_q, q_rope=AFTER)
    assert_close(out, out_after)
    assert_close(lse, lse_after)
    expected = attention(turned_q, turned, v, 98)
    assert_close(out_after, expected[0])
    assert_close(lse_after, expected[1])


def test_partial_rope_turns_the_first_coordinates_only(make_cache):
    cache = make_cache(recent_window=1000, rope=model_pb2.Rope(theta=500, width=8))
    k, v = cache.rows(30)
    cache.append(0, k, v, k_rope=BEFORE)
    fetched, _ = cache.fetch()
    assert_close(fetched, rope_half(k, 0, 500, width=8))
    assert np.array_equal(fetched[:, :, 8:], k[:, :, 8:])


def test_sealed_rows_before_rope_are_acknowledged_again(make_cache):
    cache = make_cache(recent_window=0, rope=ROPE)
    k, v = cache.rows(128)
    cache.append(0, k, v, k_rope=BEFORE)
    assert cache.append(0, k, v, k_rope=BEFORE).tokens == 0
