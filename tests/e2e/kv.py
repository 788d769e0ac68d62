"""Requests as numpy arrays, and attention in float64 to compare with."""

import grpc
import numpy as np
import pytest

from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2, tensor_pb2

FP32, FP16, BF16 = tensor_pb2.DTYPE_FP32, tensor_pb2.DTYPE_FP16, tensor_pb2.DTYPE_BF16
AFTER, BEFORE = tensor_pb2.ROPE_FORM_AFTER, tensor_pb2.ROPE_FORM_BEFORE
TIMEOUT = 120  # seconds; a call that hangs fails its test


def to_bf16_bits(array):
    """fp32 to the upper 16 bits, to nearest even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16_bits(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def encode(array, dtype):
    if dtype == BF16:
        return to_bf16_bits(array)
    return np.ascontiguousarray(array, {FP32: "<f4", FP16: "<f2"}[dtype])


def rounded(array, dtype):
    """What is left of fp32 values after a way through `dtype`."""
    encoded = encode(array, dtype)
    return from_bf16_bits(encoded) if dtype == BF16 else encoded.astype(np.float32)


def tensor(array, dtype=FP32):
    encoded = encode(array, dtype)
    return tensor_pb2.Tensor(dtype=dtype, dims=encoded.shape, data=encoded.tobytes())


def array_of(message):
    """A dense tensor of an answer."""
    assert list(message.strides) == [] or list(message.strides) == dense_strides(message)
    if message.dtype == BF16:
        flat = from_bf16_bits(np.frombuffer(message.data, "<u2"))
    else:
        flat = np.frombuffer(message.data, {FP32: "<f4", FP16: "<f2"}[message.dtype]).astype(np.float32)
    return flat.reshape(list(message.dims))


def dense_strides(message):
    size = 4 if message.dtype == FP32 else 2
    strides = []
    for dim in reversed(message.dims):
        strides.insert(0, size)
        size *= dim
    return strides


class Tenant:
    """A stub whose calls are a tenant's: they have the metadata `qkv-tenant`. Of "" it is the stub itself."""

    def __new__(cls, stub, tenant):
        return super().__new__(cls) if tenant else stub

    def __init__(self, stub, tenant):
        self._stub, self._tenant = stub, tenant

    def __getattr__(self, method):
        call = getattr(self._stub, method)
        return lambda request, **fields: call(request, metadata=(("qkv-tenant", self._tenant),), **fields)


class Cache:
    """A model and one session of it, as small as the tests want it."""

    def __init__(self, stub, name, layers=2, kv_heads=2, q_heads=4, key_dim=16, value_dim=16, dtype=FP32, seed=1,
                 recent_window=None, bits_k=0, bits_v=0, first_position=0, purpose=0, durability=0, **model_fields):
        self.stub, self.name = stub, name
        self.kv_heads, self.q_heads, self.key_dim, self.value_dim = kv_heads, q_heads, key_dim, value_dim
        self.random = np.random.default_rng(seed)
        self.model = model_pb2.Model(name=f"model-{name}", layers=layers, kv_heads=kv_heads, q_heads=q_heads,
                                     key_dim=key_dim, value_dim=value_dim, dtype=dtype, **model_fields)
        stub.RegisterModel(model_pb2.RegisterModelRequest(model=self.model), timeout=TIMEOUT)
        policy = model_pb2.CodecPolicy(bits_k=bits_k, bits_v=bits_v)
        if recent_window is not None:
            policy.recent_window = recent_window
        stub.OpenSession(kv.OpenSessionRequest(session=name, model=self.model.name, policy=policy, purpose=purpose,
                                               first_position=first_position, durability=durability),
                         timeout=TIMEOUT)

    def rows(self, tokens):
        """Random K and V."""
        k = self.random.standard_normal((tokens, self.kv_heads, self.key_dim)).astype(np.float32)
        v = self.random.standard_normal((tokens, self.kv_heads, self.value_dim)).astype(np.float32)
        return k, v

    def queries(self, count):
        return self.random.standard_normal((count, self.q_heads, self.key_dim)).astype(np.float32)

    def item(self, position=0, k=None, v=None, q=None, layer=0, dtype=FP32, in_floats=True, **fields):
        """With queries, attention is in FP32 unless `in_floats` is false or the options say otherwise."""
        item = kv.Item(session=self.name, layer=layer, position=position, **fields)
        if q is not None and in_floats and item.options.precision == 0:
            item.options.precision = kv.AttendOptions.PRECISION_FP32
        for field, array in (("k", k), ("v", v), ("q", q)):
            if array is not None:
                getattr(item, field).CopyFrom(tensor(array, dtype))
        return item

    def append(self, position, k, v, **fields):
        request = kv.AppendRequest(items=[self.item(position, k, v, **fields)])
        return self.stub.Append(iter([request]), timeout=TIMEOUT)

    def attend(self, position, q, out_dtype=0, **fields):
        """(out, lse) of one item."""
        request = kv.AttendRequest(items=[self.item(position, q=q, **fields)], out_dtype=out_dtype)
        result = self.stub.Attend(request, timeout=TIMEOUT).results[0]
        assert result.status.code == 0
        return array_of(result.out), array_of(result.lse)

    def fetch(self, layers=(0,), dtype=FP32, **fields):
        """(K, V) of one layer, all pieces put together; checks that they come in order."""
        request = kv.FetchRequest(session=self.name, layers=layers, dtype=dtype, **fields)
        k, v, expected = [], [], None
        for piece in self.stub.Fetch(request, timeout=TIMEOUT):
            assert piece.layer == layers[0]
            assert expected is None or piece.position == expected
            expected = piece.position + piece.k.dims[0]
            k.append(array_of(piece.k))
            v.append(array_of(piece.v))
        return np.concatenate(k), np.concatenate(v)

    def info(self):
        return self.stub.GetSession(kv.GetSessionRequest(session=self.name), timeout=TIMEOUT)

    def state(self):
        """What must be as before after a call that failed."""
        info = self.info()
        info.ClearField("last_used_unix_ms")
        return info.SerializeToString(deterministic=True)


def attention(q, k, v, query_position, key_position=0, scale=None, window=0, soft_cap=0.0, causal=True):
    """Softmax attention in float64: out [n, q_heads, value_dim], lse [n, q_heads]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scale = 1 / np.sqrt(q.shape[2]) if scale is None else scale
    scores = np.einsum("nhd,thd->nht", q, k) * scale
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    queries = (query_position + np.arange(q.shape[0]))[:, None, None]
    keys = (key_position + np.arange(k.shape[0]))[None, None, :]
    seen = np.ones_like(scores, bool)
    if causal:
        seen &= keys <= queries
        if window:
            seen &= keys > queries - window
    scores = np.where(seen, scores, -np.inf)
    top = np.max(scores, axis=2, initial=-np.inf)
    weights = np.where(seen, np.exp(scores - np.where(np.isinf(top), 0, top)[:, :, None]), 0)
    total = weights.sum(axis=2)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, np.log(total) + np.where(np.isinf(top), 0, top), -np.inf)
    out = np.einsum("nht,thd->nhd", weights, v) / np.where(total > 0, total, 1)[:, :, None]
    return out, lse


def rope_half(rows, position, theta, width=None):
    """Rows [tokens, heads, dim] turned to their positions, halves paired; float64."""
    rows = np.array(rows, np.float64)
    width = width or rows.shape[2]
    half = width // 2
    angles = (position + np.arange(rows.shape[0]))[:, None] * theta ** (-2 * np.arange(half) / width)
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    first, second = rows[:, :, :half].copy(), rows[:, :, half:width].copy()
    rows[:, :, :half] = first * cos - second * sin
    rows[:, :, half:width] = second * cos + first * sin
    return rows


def assert_close(actual, expected, relative=1e-5):
    """Largest difference within `relative` of the largest value; infinities in the same places."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    assert np.array_equal(np.isinf(actual), np.isinf(expected))
    finite = np.isfinite(expected)
    if finite.any():
        error = np.max(np.abs(actual[finite] - expected[finite]))
        assert error <= relative * max(np.max(np.abs(expected[finite])), 1e-30), error


def refused(code, *texts):
    """Context manager: the call inside fails with `code` and a message that holds all of `texts`."""
    return _Refused(code, texts)


class _Refused:
    def __init__(self, code, texts):
        self.code, self.texts = code, texts

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        if kind is None:
            pytest.fail(f"succeeded, expected {self.code}")
        if not issubclass(kind, grpc.RpcError):
            return False
        assert value.code() == self.code, f"{value.code()}: {value.details()}"
        for text in self.texts:
            assert text in value.details(), f"{text!r} is not in {value.details()!r}"
        self.details = value.details()
        return True
