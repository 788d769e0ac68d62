"""Every bad input gets its documented status and a message with field, value and limit, and changes nothing."""

import socket

import grpc
import numpy as np
import pytest

from daemon import PATIENCE, Daemon
from kv import FP32, TIMEOUT, refused, tensor
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2, tensor_pb2

INVALID = grpc.StatusCode.INVALID_ARGUMENT
MODEL = {"name": "bad-model", "layers": 2, "kv_heads": 2, "q_heads": 4, "key_dim": 16, "value_dim": 16, "dtype": FP32}


@pytest.mark.parametrize("fields,texts", [
    ({"name": ""}, ["name"]),
    ({"name": "a b"}, ["name"]),
    ({"name": "x" * 129}, ["name", "128"]),
    ({"layers": 0}, ["layers is 0", "1", "1024"]),
    ({"layers": 1025}, ["layers is 1025", "1024"]),
    ({"kv_heads": 0}, ["kv_heads is 0"]),
    ({"kv_heads": 1025, "q_heads": 1025}, ["kv_heads is 1025", "1024"]),
    ({"q_heads": 3}, ["q_heads is 3", "multiple", "kv_heads"]),
    ({"q_heads": 0}, ["q_heads is 0"]),
    ({"key_dim": 12}, ["key_dim is 12", "8"]),
    ({"key_dim": 0}, ["key_dim is 0"]),
    ({"value_dim": 1032}, ["value_dim is 1032", "1024"]),
    ({"dtype": 0}, ["dtype"]),
    ({"dtype": 9}, ["dtype", "9"]),
    ({"scale": float("nan")}, ["scale", "nan"]),
    ({"scale": -1.0}, ["scale", "-1"]),
    ({"soft_cap": float("inf")}, ["soft_cap", "inf"]),
    ({"rope": model_pb2.Rope(theta=0.5)}, ["rope.theta", "0.5"]),
    ({"rope": model_pb2.Rope(theta=10000, width=7)}, ["rope.width", "7"]),
    ({"rope": model_pb2.Rope(theta=10000, width=32)}, ["rope.width", "32", "16"]),
    ({"rope": model_pb2.Rope(theta=10000, scaling=1)}, ["rope.factor", "0"]),
    ({"policy": model_pb2.CodecPolicy(bits_k=8.125)}, ["bits_k is 8.125", "multiples of 0.125 up to 8"]),
    ({"policy": model_pb2.CodecPolicy(bits_v=2.3)}, ["bits_v is 2.3"]),
    ({"policy": model_pb2.CodecPolicy(codec="zip")}, ["codec"]),
])
def test_model(stub, fields, texts):
    model = model_pb2.Model(**{**MODEL, **fields})
    with refused(INVALID, "model.", *texts):
        stub.RegisterModel(model_pb2.RegisterModelRequest(model=model), timeout=TIMEOUT)
    names = [entry.model.name for entry in stub.ListModels(model_pb2.ListModelsRequest(), timeout=TIMEOUT).models]
    assert "bad-model" not in names


def test_model_that_is_missing_or_does_not_fit(stub):
    with refused(INVALID, "model is missing"):
        stub.RegisterModel(model_pb2.RegisterModelRequest(), timeout=TIMEOUT)
    for fields, code in (({"overrides": [model_pb2.LayerOverride(layer=2)]}, INVALID),
                         ({"calibration": b"x"}, grpc.StatusCode.DATA_LOSS)):
        with refused(code, next(iter(fields))):
            stub.RegisterModel(model_pb2.RegisterModelRequest(model=model_pb2.Model(**{**MODEL, **fields})),
                               timeout=TIMEOUT)
    with refused(grpc.StatusCode.NOT_FOUND, "no-such-model"):
        stub.GetModel(model_pb2.GetModelRequest(name="no-such-model"), timeout=TIMEOUT)


@pytest.mark.parametrize("fields,code,texts", [
    ({"model": "no-such-model"}, grpc.StatusCode.NOT_FOUND, ["no-such-model"]),
    ({"session": ""}, INVALID, ["session"]),
    ({"session": "sp ace"}, INVALID, ["session"]),
    ({"session": "x" * 129}, INVALID, ["session", "128"]),
    ({"tenant": "ten ant"}, INVALID, ["tenant"]),
    ({"policy": model_pb2.CodecPolicy(bits_k=9)}, INVALID, ["bits_k is 9"]),
    ({"policy": model_pb2.CodecPolicy(bits_v=float("nan"))}, INVALID, ["bits_v", "nan"]),
    ({"policy": model_pb2.CodecPolicy(recent_window=2000000)}, INVALID, ["recent_window is 2000000", "1048576"]),
    ({"purpose": 9}, INVALID, ["purpose is 9"]),
    ({"durability": kv.DURABILITY_ASYNC}, grpc.StatusCode.FAILED_PRECONDITION, ["durability"]),
    ({"durability": kv.DURABILITY_SYNC}, grpc.StatusCode.FAILED_PRECONDITION, ["durability"]),
    ({"max_attention_error": 1.5}, INVALID, ["max_attention_error is 1.5, allowed are 0 to 1"]),
    ({"max_attention_error": float("nan")}, INVALID, ["max_attention_error is nan, allowed are 0 to 1"]),
])
def test_open_session(stub, fields, code, texts):
    stub.RegisterModel(model_pb2.RegisterModelRequest(model=model_pb2.Model(**{**MODEL, "name": "good"})),
                       timeout=TIMEOUT)
    request = {"session": "bad-session", "model": "good", **fields}
    with refused(code, *texts):
        stub.OpenSession(kv.OpenSessionRequest(**request), timeout=TIMEOUT)
    with refused(grpc.StatusCode.NOT_FOUND, "bad-session"):
        stub.GetSession(kv.GetSessionRequest(session="bad-session"), timeout=TIMEOUT)


def test_unknown_session_everywhere(stub, make_cache):
    item = make_cache().item(0, *make_cache().rows(1))
    item.session = "nobody"
    query = kv.Item(session="nobody", q=tensor(np.zeros((1, 4, 16))))
    for call in (lambda: stub.GetSession(kv.GetSessionRequest(session="nobody"), timeout=TIMEOUT),
                 lambda: stub.CloseSession(kv.CloseSessionRequest(session="nobody"), timeout=TIMEOUT),
                 lambda: stub.Truncate(kv.TruncateRequest(session="nobody"), timeout=TIMEOUT),
                 lambda: list(stub.Fetch(kv.FetchRequest(session="nobody"), timeout=TIMEOUT)),
                 lambda: stub.Append(iter([kv.AppendRequest(items=[item])]), timeout=TIMEOUT),
                 lambda: stub.Attend(kv.AttendRequest(items=[query]), timeout=TIMEOUT)):
        with refused(grpc.StatusCode.NOT_FOUND, "nobody"):
            call()


def edited(field, **changes):
    """An edit of one tensor of an item."""
    def edit(item):
        message = getattr(item, field)
        for key, value in changes.items():
            if isinstance(value, list):
                del getattr(message, key)[:]
                getattr(message, key).extend(value)
            else:
                setattr(message, key, value)
    return edit


def with_value(field, index, value):
    """An edit that puts one value into a tensor of fp32."""
    def edit(item):
        message = getattr(item, field)
        data = np.frombuffer(message.data, "<f4").reshape(list(message.dims)).copy()
        data[index] = value
        message.data = data.tobytes()
    return edit


def without(field):
    return lambda item: item.ClearField(field)


def setting(**fields):
    def edit(item):
        for key, value in fields.items():
            setattr(item, key, value)
    return edit


# What is done to a good item of 3 tokens and 2 queries at position 70, and what must be said of it. The session
# has 70 tokens in layer 0.
ROWS = [
    (edited("k", dims=[3, 3, 16], data=bytes(3 * 3 * 16 * 4)), INVALID, ["k.dims[1] is 3", "2 kv_heads"]),
    (edited("v", dims=[3, 2, 8], data=bytes(3 * 2 * 8 * 4)), INVALID, ["v.dims[2] is 8", "value_dim", "16"]),
    (edited("k", dims=[3, 2, 24], data=bytes(3 * 2 * 24 * 4)), INVALID, ["k.dims[2] is 24", "key_dim", "16"]),
    (edited("k", dims=[96]), INVALID, ["k.dims", "3"]),
    (edited("k", dims=[3, 2, 4, 4]), INVALID, ["k.dims", "3"]),
    (edited("k", dims=[3, 2, 2, 2, 2, 2]), INVALID, ["k.dims", "3"]),
    (edited("k", dims=[]), INVALID, ["k.dims", "3"]),
    (edited("k", dims=[0, 2, 16], data=b""), INVALID, ["k.dims[0] is 0", "1"]),
    (edited("k", dims=[-3, 2, 16]), INVALID, ["k.dims[0] is -3"]),
    (edited("k", dims=[1 << 62, 2, 16]), INVALID, ["k.dims"]),
    (edited("k", dims=[4, 2, 16]), INVALID, ["k.data", "384", "512"]),
    (edited("k", data=b""), INVALID, ["k.data", "0"]),
    (edited("v", dims=[2, 2, 16]), INVALID, ["v.dims[0] is 2", "3"]),
    (edited("k", dtype=0), INVALID, ["k.dtype is 0"]),
    (edited("k", dtype=7), INVALID, ["k.dtype is 7"]),
    (edited("k", strides=[128, 64, -4]), INVALID, ["k.strides[2] is -4"]),
    (edited("k", strides=[-128, 64, 4]), INVALID, ["k.strides[0] is -128"]),
    (edited("k", strides=[128, 64, 8]), INVALID, ["k.strides[2] is 8", "4"]),
    (edited("k", strides=[130, 64, 4]), INVALID, ["k.strides[0] is 130", "4"]),
    (edited("k", strides=[128, 64]), INVALID, ["k.strides", "2", "3"]),
    (edited("k", strides=[1280, 64, 4]), INVALID, ["k.data", "384"]),
    (edited("k", strides=[1 << 62, 64, 4]), INVALID, ["k"]),
    (edited("k", shared_memory_region="region"), grpc.StatusCode.UNIMPLEMENTED, ["k.shared_memory_region"]),
    (with_value("k", (2, 1, 5), np.nan), INVALID, ["k[2, 1, 5] is nan"]),
    (with_value("v", (0, 0, 15), np.inf), INVALID, ["v[0, 0, 15] is inf"]),
    (with_value("v", (0, 0, 15), -np.inf), INVALID, ["v[0, 0, 15] is", "inf"]),
    (with_value("k", (1, 0, 0), 40000.0), INVALID, ["k[1, 0, 0] is 40000", "32768"]),
    (without("v"), INVALID, ["v is missing"]),
    (without("k"), INVALID, ["k is missing"]),
    (setting(layer=2), INVALID, ["layer is 2", "2 layers"]),
    (setting(layer=4000000000), INVALID, ["layer is 4000000000"]),
    (setting(position=71), grpc.StatusCode.FAILED_PRECONDITION, ["position is 71", "expected position is 70"]),
    (setting(position=(1 << 64) - 1), INVALID, ["position is 18446744073709551615", "9007199254740992"]),
    (setting(position=69), grpc.StatusCode.ALREADY_EXISTS, ["69"]),
    (setting(session=""), INVALID, ["session"]),
    (setting(session="x" * 200), INVALID, ["session"]),
    (setting(k_rope=9), INVALID, ["k_rope is 9"]),
]
QUERIES = [
    (edited("q", dims=[2, 3, 16], data=bytes(2 * 3 * 16 * 4)), INVALID, ["q.dims[1] is 3", "4 q_heads"]),
    (edited("q", dims=[2, 4, 8], data=bytes(2 * 4 * 8 * 4)), INVALID, ["q.dims[2] is 8", "16"]),
    (edited("q", dims=[0, 4, 16], data=b""), INVALID, ["q.dims[0] is 0"]),
    (edited("q", dtype=0), INVALID, ["q.dtype is 0"]),
    (edited("q", strides=[4, 4, 4, 4]), INVALID, ["q.strides"]),
    (with_value("q", (1, 3, 5), np.nan), INVALID, ["q[1, 3, 5] is nan"]),
    (with_value("q", (0, 0, 0), -1e30), INVALID, ["q[0, 0, 0]", "32768"]),
    (lambda item: item.options.CopyFrom(kv.AttendOptions(scale=float("nan"))), INVALID, ["options.scale is nan"]),
    (lambda item: item.options.CopyFrom(kv.AttendOptions(scale=-1)), INVALID, ["options.scale is -1"]),
    (lambda item: item.options.CopyFrom(kv.AttendOptions(soft_cap=-2)), INVALID, ["options.soft_cap is -2"]),
    (lambda item: item.options.CopyFrom(kv.AttendOptions(soft_cap=float("inf"))), INVALID, ["options.soft_cap is inf"]),
    (lambda item: item.options.CopyFrom(kv.AttendOptions(not_causal=True, sliding_window=5)), INVALID,
     ["options.not_causal", "sliding window"]),
    (lambda item: item.options.CopyFrom(kv.AttendOptions(range=tensor_pb2.TokenRange(begin=9, end=5))), INVALID,
     ["options.range.begin is 9", "5"]),
]


@pytest.fixture
def filled(make_cache):
    """A session with 70 tokens in layer 0, some of them sealed."""
    cache = make_cache(recent_window=0)
    cache.append(0, *cache.rows(70))
    return cache


@pytest.mark.parametrize("edit,code,texts", ROWS)
def test_rows_of_append(filled, edit, code, texts):
    item = filled.item(70, *filled.rows(3))
    edit(item)
    state, rows = filled.state(), filled.fetch()
    with refused(code, "message 0: items[0]", *texts):
        filled.stub.Append(iter([kv.AppendRequest(items=[item])]), timeout=TIMEOUT)
    assert filled.state() == state
    assert all(np.array_equal(before, after) for before, after in zip(rows, filled.fetch()))


@pytest.mark.parametrize("edit,code,texts", ROWS + QUERIES)
def test_items_of_attend(filled, edit, code, texts):
    item = filled.item(70, *filled.rows(3), q=filled.queries(2))
    edit(item)
    state = filled.state()
    with refused(code, "items[0]", *texts):
        filled.stub.Attend(kv.AttendRequest(items=[item]), timeout=TIMEOUT)
    if (edit, code, texts) in ROWS:
        assert filled.state() == state
    (answer,) = filled.stub.Decode(iter([kv.AttendRequest(items=[item])]), timeout=TIMEOUT)
    assert answer.results[0].status.code == code.value[0]


def test_empty_requests(filled):
    for request in (kv.AttendRequest(), kv.AttendRequest(items=[kv.Item(session=filled.name)])):
        with refused(INVALID, "items"):
            filled.stub.Attend(request, timeout=TIMEOUT)
    with refused(INVALID, "items is empty"):
        filled.stub.Append(iter([kv.AppendRequest()]), timeout=TIMEOUT)
    with refused(INVALID, "q"):
        filled.stub.Append(iter([kv.AppendRequest(items=[filled.item(70, q=filled.queries(1))])]), timeout=TIMEOUT)
    with refused(INVALID, "no message"):
        filled.stub.Append(iter([]), timeout=TIMEOUT)
    assert list(filled.stub.Decode(iter([]), timeout=TIMEOUT)) == []


def test_too_many_items_and_unknown_out_dtype(filled):
    item = filled.item(69, q=filled.queries(1))
    with refused(INVALID, "items has 1025 entries", "1024"):
        filled.stub.Attend(kv.AttendRequest(items=[item] * 1025), timeout=TIMEOUT)
    assert len(filled.stub.Attend(kv.AttendRequest(items=[item] * 1024), timeout=TIMEOUT).results) == 1024
    with refused(INVALID, "out_dtype is 9"):
        filled.stub.Attend(kv.AttendRequest(items=[item], out_dtype=9), timeout=TIMEOUT)


@pytest.mark.parametrize("fields,code,texts", [
    ({"session": ""}, INVALID, ["session"]),
    ({"layers": [2]}, INVALID, ["layer", "2"]),
    ({"dtype": 9}, INVALID, ["dtype is 9"]),
    ({"layout": 9}, INVALID, ["layout is 9"]),
    ({"part": 9}, INVALID, ["part is 9"]),
    ({"rope": 9}, INVALID, ["rope is 9"]),
    ({"range": tensor_pb2.TokenRange(begin=9, end=5)}, INVALID, ["range.begin is 9", "5"]),
    ({"coded": True, "part": 1}, INVALID, ["part is 1", "coded is set"]),
])
def test_fetch(filled, fields, code, texts):
    with refused(code, *texts):
        list(filled.stub.Fetch(kv.FetchRequest(**{"session": filled.name, **fields}), timeout=TIMEOUT))


def raw_call(daemon, path, data):
    """A unary call with these bytes for a message."""
    return daemon.channel().unary_unary(path)(data, timeout=PATIENCE)


UNARY = ["RegisterModel", "GetModel", "OpenSession", "CloseSession", "GetSession", "Attend", "Truncate"]


@pytest.mark.parametrize("method", UNARY)
def test_truncated_protobuf_of_every_method(daemon, stub, method):
    for data in (b"\x0a", b"\x0a\x05abc", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", b"\x0b\x08"):
        with refused(INVALID):
            raw_call(daemon, f"/qkv.v1.KvCache/{method}", data)


def test_every_prefix_of_a_request(daemon, filled):
    """Cut anywhere, an Attend that would append leaves the session as it was or is a whole request."""
    item = filled.item(70, *filled.rows(1), q=filled.queries(1))
    whole = kv.AttendRequest(items=[item]).SerializeToString()
    call = daemon.channel().unary_unary("/qkv.v1.KvCache/Attend")
    state = filled.state()
    for end in range(0, len(whole), 7):
        with refused(INVALID):
            call(whole[:end], timeout=TIMEOUT)
    assert filled.state() == state
    call(whole, timeout=TIMEOUT)
    assert filled.info().lengths[0] == 71


def test_unary_call_without_a_message(daemon, filled):
    call = daemon.channel().stream_unary("/qkv.v1.KvCache/GetSession")
    with refused(INVALID):
        call(iter([]), timeout=TIMEOUT)


def test_fields_nobody_knows_are_skipped(daemon, filled):
    request = kv.AttendRequest(items=[filled.item(69, q=filled.queries(1))]).SerializeToString()
    unknown = b"\xfa\x3f\x03abc" + b"\xf8\x3f\x07"  # fields 1023: bytes, then a varint
    assert raw_call(daemon, "/qkv.v1.KvCache/Attend", unknown + request + unknown)


def test_message_larger_than_the_limit(filled):
    tokens = (65 << 20) // (2 * 2 * 16 * 4)
    k = np.zeros((tokens, 2, 16), np.float32)
    state = filled.state()
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "67108864"):
        filled.append(70, k, k)
    assert filled.state() == state


GARBAGE = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 4096, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1024,
           b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", bytes(np.random.default_rng(3).integers(0, 256, 65536, np.uint8))]


@pytest.mark.parametrize("index", range(len(GARBAGE)))
def test_garbage_on_the_port(daemon, stub, index):
    host, port = daemon.tcp.rsplit(":", 1)
    for family, address in ((socket.AF_INET, (host, int(port))), (socket.AF_UNIX, daemon.socket)):
        with socket.socket(family) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(address)
            try:
                connection.sendall(GARBAGE[index])
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
            except OSError:
                pass  # reset by the daemon: as good
    assert daemon.status().state == "serving"


def test_connections_that_say_nothing(daemon, stub):
    connections = []
    for _ in range(50):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(daemon.socket)
        connections.append(connection)
    assert daemon.status().state == "serving"
    for connection in connections:
        connection.close()


def test_limits_of_models_and_sessions():
    with Daemon("--limit-models", "2", "--limit-sessions", "3") as daemon:
        stub = daemon.stub()
        for index in range(2):
            model = model_pb2.Model(**{**MODEL, "name": f"m{index}"})
            stub.RegisterModel(model_pb2.RegisterModelRequest(model=model), timeout=TIMEOUT)
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "limit-models", "2"):
            stub.RegisterModel(model_pb2.RegisterModelRequest(model=model_pb2.Model(**MODEL)), timeout=TIMEOUT)
        for index in range(3):
            stub.OpenSession(kv.OpenSessionRequest(session=f"s{index}", model="m0"), timeout=TIMEOUT)
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "limit-sessions", "3"):
            stub.OpenSession(kv.OpenSessionRequest(session="s3", model="m0"), timeout=TIMEOUT)
        stub.CloseSession(kv.CloseSessionRequest(session="s0"), timeout=TIMEOUT)
        stub.OpenSession(kv.OpenSessionRequest(session="s3", model="m0"), timeout=TIMEOUT)


UNKNOWN = b"\xf8\x07\x01"  # field 127, which no message has


def raw(daemon, method, request):
    return daemon.channel().unary_unary(method)(request, timeout=TIMEOUT)


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Check", "/qkv.v1.KvCache/GetModel", "/qkv.v1.KvCache/GetSession",
                                    "/qkv.v1.KvCache/GetCalibration", "/qkv.v1.Admin/GetStatus"])
def test_requests_that_need_no_place(daemon, method):
    """They are unpacked by the thread that reads for all: 1 MiB of small fields took it 0.1 s."""
    with pytest.raises(grpc.RpcError) as refused:
        raw(daemon, method, UNKNOWN * 100000)
    assert refused.value.code() == INVALID
    health = "Health" in method
    assert refused.value.details() == f"request is 300000 bytes, at most {1024 if health else 16384}"
    with pytest.raises(grpc.RpcError) as refused:
        raw(daemon, method, UNKNOWN * 5000)
    assert refused.value.code() == INVALID
    assert refused.value.details() == ("request is 15000 bytes, at most 1024" if health else
                                       "request has more than 2048 fields")


@pytest.mark.parametrize("method", ["/qkv.v1.KvCache/Touch", "/qkv.v1.KvCache/HasSessions", "/qkv.v1.Objects/GetObjects",
                                    "/qkv.v1.KvCache/RegisterModel"])
def test_very_many_fields(daemon, method):
    with pytest.raises(grpc.RpcError) as refused:
        raw(daemon, method, UNKNOWN * 70000)
    assert refused.value.code() == INVALID
    assert refused.value.details() == "request has more than 65536 fields"


@pytest.mark.parametrize("method", ["/qkv.v1.KvCache/Attend", "/qkv.v1.KvCache/Match", "/qkv.v1.KvCache/OpenSession"])
def test_very_many_fields_of_large_messages(daemon, method):
    with pytest.raises(grpc.RpcError) as refused:
        raw(daemon, method, UNKNOWN * 1000000)
    assert refused.value.code() == INVALID and "too many fields" in refused.value.details()
