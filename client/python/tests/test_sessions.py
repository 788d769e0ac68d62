"""Sessions against a real daemon: rows in, attention and rows out, and the calls around them."""

import asyncio
import copy
import dataclasses
import pickle
import typing

import ml_dtypes
import numpy as np
import pytest
from conftest import DIM, FLOATS, KV_HEADS, LAYERS, Q_HEADS, attention

import qkvd


def test_append_attend_fetch(session, rows, queries):
    k, v = rows(100)
    assert session.append(0, k[:90], v[:90]) == 90
    assert session.append(0, k[90:], v[90:]) == 10
    assert session.lengths == (100, 0)
    q = queries(3)
    out, lse = session.attend(0, q, options=FLOATS)
    expected_out, expected_lse = attention(q, k, v, 97)
    np.testing.assert_allclose(out, expected_out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    assert out.dtype == lse.dtype == np.float32 and out.flags.writeable and out.flags.aligned
    fetched = session.fetch(0)
    assert np.array_equal(fetched[0], k) and np.array_equal(fetched[1], v)


def test_rows_and_queries_in_one_call(session, rows, queries):
    k, v = rows(20)
    q = queries(20)
    out, _ = session.attend(1, q, k=k, v=v, options=FLOATS)
    np.testing.assert_allclose(out, attention(q, k, v, 0)[0], rtol=1e-4, atol=1e-5)
    assert session.lengths == (0, 20)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_dtypes_in_and_out(client, name, rows, queries, dtype):
    client.register_model(
        qkvd.Model(name=name, layers=1, kv_heads=KV_HEADS, q_heads=Q_HEADS, key_dim=DIM, value_dim=DIM, dtype=dtype)
    )
    to = {"fp32": lambda a: a, "fp16": lambda a: a.astype(np.float16), "bf16": qkvd.fp32_to_bf16}[dtype]
    k, v = map(to, rows(10))
    with client.open(name, model=name, policy=qkvd.EXACT) as session:
        session.append(0, k, v)
        if dtype == "bf16":  # the same bits by another name
            assert session.append(0, k.view(ml_dtypes.bfloat16), v.view(ml_dtypes.bfloat16), position=0) == 0
        back = session.fetch(0)
        assert back[0].dtype == k.dtype and np.array_equal(back[0], k) and np.array_equal(back[1], v)
        place = np.zeros((12, KV_HEADS, DIM), k.dtype), np.zeros((12, KV_HEADS, DIM), k.dtype)
        got = session.fetch(0, out=place)
        assert got[0].base is place[0] or got[0].base is place[0].base
        assert np.array_equal(place[0][:10], k) and np.array_equal(place[1][:10], v)
        out, _ = session.attend(0, to(queries(2)), dtype=dtype)
        assert out.dtype == k.dtype and out.shape == (2, Q_HEADS, DIM)
    widened = qkvd.bf16_to_fp32(qkvd.fp32_to_bf16(np.float32([1, -2.5, 3.140625])))
    assert np.array_equal(widened, np.float32([1, -2.5, 3.140625]))


def test_float64_and_big_endian_are_converted(session, rows):
    k, v = rows(4)
    assert session.append(0, k.astype(np.float64), v.astype(">f4")) == 4
    assert np.array_equal(session.fetch(0)[0], k) and np.array_equal(session.fetch(0)[1], v)


def test_layouts(session, rows):
    """Whatever the order in memory, the rows are the same; heads first goes as it lies."""
    k, v = rows(64)
    heads_first = [np.ascontiguousarray(a.transpose(1, 0, 2)).transpose(1, 0, 2) for a in (k, v)]
    assert session.append(0, *heads_first) == 64
    assert session.append(0, k[::-1][::-1], np.asfortranarray(v), position=0) == 0
    wide = np.zeros((64, KV_HEADS, 2 * DIM), np.float32)
    wide[..., ::2] = k
    assert session.append(0, wide[..., ::2], v, position=0) == 0
    assert session.append(0, np.broadcast_to(k[:1], (2, KV_HEADS, DIM)), np.broadcast_to(v[:1], (2, KV_HEADS, DIM))) == 2
    assert np.array_equal(session.fetch(0, end=64)[0], k)
    got = session.fetch(0, end=64, heads_first=True)
    assert np.array_equal(got[0], k.transpose(1, 0, 2)) and np.array_equal(got[1], v.transpose(1, 0, 2))


class Foreign:
    """What another library's array looks like."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __len__(self):
        return len(self.array)

    def __getitem__(self, where):
        return Foreign(self.array[where])

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack(session, rows):
    k, v = rows(8)
    assert session.append(0, Foreign(k), Foreign(v)) == 8
    assert np.array_equal(session.fetch(0)[0], k)


def test_large_appends_and_attends_go_in_pieces(client, name, random, queries):
    client.register_model(qkvd.Model(name=name, layers=1, kv_heads=8, q_heads=64, key_dim=128, value_dim=128))
    k, v = (random.standard_normal((1000, 8, 128), np.float32).astype(np.float16) for _ in range(2))
    q = random.standard_normal((600, 64, 128), np.float32)  # 20 MB, and as much of an answer
    with client.open(name, model=name, policy=qkvd.EXACT) as session:
        assert session.append(0, k, v) == 1000  # 4 MB
        back = session.fetch(0)
        assert np.array_equal(back[0], k) and np.array_equal(back[1], v)
        place = np.zeros((600, 64, 128), np.float32)
        out, lse = session.attend(0, q, position=0, out=place)
        assert out is place and place[-1].any() and lse.shape == (600, 64)
    with client.open(name, model=name, policy=qkvd.EXACT) as session:
        together, _ = session.attend(0, q, k=k[:600], v=v[:600])
        np.testing.assert_allclose(together[:5], out[:5], rtol=1e-3, atol=1e-3)
        assert session.lengths == (600,)


def test_fetch_of_a_session_that_grew_elsewhere(client, session, rows):
    k, v = rows(300)
    session.append(0, k[:10], v[:10])
    client.session(session.name).append(0, k[10:], v[10:])
    assert np.array_equal(session.fetch(0)[0], k)
    assert session.lengths == (10, 0)
    session.info()
    assert session.lengths == (300, 0)
    with pytest.raises(qkvd.InvalidArgument, match="room for 100 tokens"):
        session.fetch(0, out=(np.empty_like(k[:100]), np.empty_like(v[:100])))


def test_fetch_of_parts(session, rows):
    k, v = rows(50)
    session.append(0, k, v)
    keys, none = session.fetch(0, part="k", begin=10, end=20)
    assert np.array_equal(keys, k[10:20]) and none.shape == (0, 0, 0)
    assert session.fetch(1)[0].shape == (0, 0, 0)
    pieces = list(session._client.fetch_rows(session.name, [0], chunk_tokens=20))
    assert [(piece.position, len(piece.k)) for piece in pieces] == [(0, 20), (20, 20), (40, 10)]
    assert not pieces[0].k.flags.writeable
    with pytest.raises(qkvd.InvalidArgument, match="out"):
        session.fetch(0, out=(np.empty_like(k, np.float64), np.empty_like(v)))


def test_truncate_and_positions(session, rows, queries):
    k, v = rows(50)
    for layer in range(LAYERS):
        session.append(layer, k, v)
    session.truncate(30)
    assert session.lengths == (30, 30)
    session.truncate(10, layers=[1])
    assert session.lengths == (30, 10)
    assert session.append(0, k[20:], v[20:], position=20) == 20
    with pytest.raises(qkvd.FailedPrecondition, match="10"):
        session.append(1, k, v, position=60)
    with pytest.raises(qkvd.AlreadyExists):
        session.append(0, v, k, position=0)
    with pytest.raises(qkvd.InvalidArgument, match="too few for 11 queries"):
        session.attend(1, queries(11))
    with pytest.raises(qkvd.InvalidArgument, match="layer is 2"):
        session.append(2, k, v)


def test_first_position(client, model, name, rows, queries):
    k, v = rows(5)
    with client.open(name, model=model.name, first_position=1000) as session:
        assert session.lengths == (1000, 1000)
        session.append(0, k, v)
        assert session.lengths == (1005, 1000)
        q = queries(5)
        np.testing.assert_allclose(session.attend(0, q, options=FLOATS)[0], attention(q, k, v, 0)[0], rtol=1e-4, atol=1e-5)


def test_options(session, rows, queries):
    k, v = rows(40)
    session.append(0, k, v)
    q = queries(2)
    for fields in ({"sliding_window": 7}, {"soft_cap": 2.0}, {"scale": 0.5}):
        out, _ = session.attend(0, q, options=qkvd.AttendOptions(precision="fp32", **fields))
        names = {"sliding_window": "window"}
        expected, _ = attention(q, k, v, 38, **{names.get(key, key): value for key, value in fields.items()})
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    out, lse = session.attend(0, q, options=qkvd.AttendOptions(begin=40, end=50, causal_offset=3))
    assert not out.any() and np.isneginf(lse).all()


def test_merge(session, rows, queries):
    k, v = rows(60)
    q = queries(4)
    session.append(0, k[:40], v[:40])
    held = session.attend(0, q, position=56, options=FLOATS)
    own = attention(q, k[40:], v[40:], 16)
    whole, lse = qkvd.merge(*held, *own)
    expected, expected_lse = attention(q, k, v, 56)
    np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    nothing = np.zeros_like(whole), np.full_like(lse, -np.inf)
    assert np.array_equal(qkvd.merge(*nothing, whole, lse)[0], whole)
    assert np.array_equal(qkvd.merge(*nothing, *nothing)[0], nothing[0])


def test_merge_of_bf16(session, rows, queries):
    """Which is bits, and not numbers, in numpy."""
    k, v = rows(60)
    q = queries(4)
    session.append(0, k, v)
    parts = []
    for dtype in "fp32", "bf16":
        sides = [
            session.attend(0, q, 56, options=qkvd.AttendOptions(begin=b, end=e), dtype=dtype)
            for b, e in ((0, 30), (30, 60))
        ]
        parts.append(qkvd.merge(*sides[0], *sides[1])[0])
    np.testing.assert_allclose(parts[1], parts[0], rtol=0.02, atol=0.02)


def test_bytes_are_ids(client, model, name, rows):
    """Of models whose tokens are bytes."""
    k, v = rows(64)
    text = bytes(range(64))
    with client.open(name, model=model.name, tokens=text) as session:
        for layer in range(LAYERS):
            session.append(layer, k, v)
        assert client.match(model.name, text).tokens == client.match(model.name, list(text)).tokens == 64


@pytest.mark.parametrize("of", [lambda s: s, lambda s: s._client, lambda s: qkvd.AsyncClient(s._client.target)])
def test_what_has_a_connection_is_not_pickled(session, of):
    for way in pickle.dumps, copy.deepcopy:
        with pytest.raises(TypeError, match="make a client of its own in the other process"):
            way(of(session))


def test_batches(client, model, name, rows, queries):
    sessions = [client.open(f"{name}-{i}", model=model.name) for i in range(3)]
    k, v = rows(10)
    q = queries(10)
    batch = [qkvd.Item(session=session.name, k=k, v=v) for session in sessions]
    assert client.append(batch) == 30
    asked = [qkvd.Item(session=session.name, q=q, options=FLOATS) for session in sessions]
    asked[1] = qkvd.Item(session="nobody", q=q)
    out = np.empty((10, Q_HEADS, DIM), np.float32)
    results = client.attend(asked, out=[out, None, None])
    assert results[0].out is out and np.array_equal(results[0].out, results[2].out)
    assert isinstance(results[1].error, qkvd.NotFound) and "nobody" in str(results[1].error)
    with pytest.raises(qkvd.NotFound):
        client.attend(asked[1:2])
    assert client.append([]) == 0
    assert client.append([qkvd.Item(session=sessions[0].name, layer=1, k=k, v=v), *batch]) == 10
    with pytest.raises(qkvd.InvalidArgument, match="k and v come together"):
        client.append([qkvd.Item(session=sessions[0].name, k=k)])
    for session in sessions:
        session.close()


def test_many_small_items_in_one_append(client, model, name, rows):
    k, v = rows(2500)
    with client.open(name, model=model.name) as session:
        items = [qkvd.Item(session=name, position=i, k=k[i : i + 1], v=v[i : i + 1]) for i in range(2500)]
        assert client.append(items) == 2500
        assert np.array_equal(session.fetch(0)[0], k)


def test_token_ids_go_along(session, rows, monkeypatch):
    k, v = rows(10)
    session.tokens = list(range(100, 110))
    assert session._rows(0, k[:4], v[:4], None, None).tokens == [100, 101, 102, 103]
    assert session._rows(0, k, v, None, 8).tokens is None  # unknown for some of them
    assert session.append(0, k, v) == 10


def test_sessions_and_models(client, model, name):
    assert client.model(model.name).model.kv_heads == KV_HEADS
    assert model.name in [known.model.name for known in client.models()]
    assert client.register_model(model).model.layers == LAYERS
    with pytest.raises(qkvd.AlreadyExists):
        client.register_model(qkvd.Model(name=name, layers=1, kv_heads=1, q_heads=1, key_dim=8, value_dim=8))
    with pytest.raises(qkvd.NotFound):
        client.calibration(model.name)
    opened = client.open(name, model=model.name, bits=(4, 2), policy=qkvd.Policy(recent_window=7), ttl=60, purpose="fetch")
    info = opened.info()
    assert (info.policy.bits_k, info.policy.bits_v, info.policy.recent_window, info.ttl_ms) == (4, 2, 7, 60000)
    with pytest.raises(qkvd.AlreadyExists):
        client.open(name, model=model.name)
    with pytest.raises(qkvd.NotFound):
        client.open("x", model="no-such-model")
    assert [info.session for info in client.sessions(name)] == [name]
    opened.touch(ttl=5)
    assert opened.info().ttl_ms == 5000
    opened.pin()
    assert opened.info().pinned
    opened.unpin()
    assert not opened.info().pinned
    opened.close()
    with pytest.raises(qkvd.NotFound):
        client.session(name)
    with pytest.raises(qkvd.FailedPrecondition):
        client.open(name, model=model.name, durability="sync")


def test_tiers(client, name, random):
    client.register_model(qkvd.Model(name=name, layers=1, kv_heads=2, q_heads=4, key_dim=64, value_dim=64))
    k, v = (random.standard_normal((256, 2, 64), np.float32) for _ in range(2))
    with client.open(name, model=name, bits=4, policy=qkvd.Policy(recent_window=0), keep_full=True) as session:
        session.append(0, k, v)
        demoted = session.demote(2)
        assert demoted.pages > 0
        assert session.info().bits_per_coordinate < 3.5
        assert session.prefetch().pages > 0
        assert session.info().bits_per_coordinate > 4
        stats = client.attention_stats(name, buckets=4)
        assert [(one.layer, one.kv_head) for one in stats] == [(0, 0), (0, 1)]


def test_status_and_metrics(client, session, rows):
    status = client.status()
    assert status.sessions >= 1 and status.version
    before = client.metrics()["qkvd_append_tokens_total"]
    session.append(0, *rows(5))
    assert client.metrics()["qkvd_append_tokens_total"] == before + 5


def test_match(client, model, name, rows):
    ids = list(range(300))
    with client.open(name, model=model.name, tokens=ids, salt=b"s") as session:
        for layer in range(len(session.lengths)):
            session.append(layer, *rows(200))
        match = client.match(model.name, np.arange(300), salt=b"s")
        assert match == qkvd.Match(name, 192, tokens_in_memory=192, tokens_on_ssd=0, restore_ms=0)
        assert match.root == session.info().prefix_root
        assert client.match(model.name, ids) == qkvd.Match("", 0, 0, 0, 0)
        assert client.match(model.name, []).root not in (b"", match.root)
        with qkvd.Client(client.target, tenant="t") as other:
            other.register_model(model)
            assert other.match(model.name, ids, salt=b"s").session == ""
        with client.open(name + "-prefixed", model=model.name, salt=b"s", prefix=np.arange(300)) as prefixed:
            assert set(prefixed.lengths) == {192}
        with pytest.raises(qkvd.AlreadyExists, match="position 7 has token id 7"):
            session.append(0, *rows(10), position=0, tokens=[*range(7), 8, 8, 9])
        with pytest.raises(qkvd.NotFound):
            client.match("nobody", ids)


def test_has_sessions(client, session, rows):
    session.append(0, *rows(9))
    session.append(1, *rows(5))
    nobody, one = client.has_sessions(["nobody", session.name], touch=True)
    assert (not nobody, nobody) == (True, qkvd.Presence(False, False, 0))
    assert (bool(one), one) == (True, qkvd.Presence(True, True, 5))
    assert client.has_sessions(["nobody", session.name], tokens=False) == [nobody, qkvd.Presence(True, True, 0)]
    with pytest.raises(qkvd.InvalidArgument, match="sessions has 16385 entries"):
        client.has_sessions(["a"] * 16385)


def test_put(client, model, name, rows):
    k, v = rows(100)
    ids = list(range(100))
    client.put(name, ((k, v) for _ in range(2)), model=model.name, tokens=ids, seal=True, retention="evict")
    info = client.session_info(name)
    assert (list(info.lengths), info.whole) == ([100, 100], 100)
    assert np.array_equal(client.session(name).fetch(1)[0], k)
    assert client.match(model.name, ids).tokens == 64
    with pytest.raises(qkvd.AlreadyExists):
        client.put(name, [(k, v)] * 2, model=model.name)

    def broken():
        yield k, v
        raise RuntimeError("the forward pass failed")

    with pytest.raises(qkvd.Error):
        client.put(name + "-broken", broken(), model=model.name)
    with pytest.raises(qkvd.InvalidArgument, match="retention"):
        client.put(name, [], model=model.name, retention="maybe")
    assert not client.has_sessions([name + "-broken"])[0]
    client.close_session(name)


def test_watch(client, model, name, rows):
    with client.open(name, model=model.name, tokens=list(range(128))) as session:
        session.append(0, *rows(128))
        pages = 0
        for message in client.watch(model=model.name, token_ids=True):
            pages += sum(len(event.hashes) // 16 for event in message.events if event.token_ids)
            if message.complete:
                break
        assert pages == 2 and message.instance > 0
    with pytest.raises(qkvd.InvalidArgument, match="tenant"):
        next(client.watch(tenant="no name"))


def test_fork(client, session, rows):
    for layer in range(len(session.lengths)):
        session.append(layer, *rows(200))
    with session.fork(f"{session.name}-fork", 100) as fork:
        assert fork.lengths == (100,) * len(session.lengths)
        assert all(np.array_equal(a, b[:100]) for a, b in zip(fork.fetch(0), session.fetch(0), strict=True))
        fork.append(0, *rows(50))
        assert fork.lengths[0] == 150 and session.lengths[0] == 200
        with pytest.raises(qkvd.AlreadyExists):
            session.fork(fork.name)
        with pytest.raises(qkvd.FailedPrecondition, match="layer 0 ends at 200"):
            session.fork("beyond", 201)


@pytest.mark.parametrize("way", ["fork", "fork all", "truncate", "truncate layers"])
def test_ids_of_a_sequence_that_goes_another_way(client, model, name, rows, way):
    """The ids that the session was opened with are not those of its new rows."""
    ids, layers = list(range(1000, 1256)), range(LAYERS)
    k, v = rows(256)

    def append(session, begin, end, **fields):
        for layer in layers:
            session.append(layer, k[begin:end] + begin, v[begin:end], **fields)

    with client.open(name, model=model.name, tokens=ids) as session:
        append(session, 0, 192)
        assert client.match(model.name, ids).tokens == 192
        if way == "truncate":
            session.truncate(64)
        elif way == "truncate layers":
            session.truncate(64, layers=list(layers))
        else:
            session = session.fork(f"{name}-fork", 64 if way == "fork" else 0)
            client.close_session(name)
        begin = session.lengths[0]
        append(session, begin, 256)
        assert client.match(model.name, ids).tokens == begin == (192 if way == "fork all" else 64)
        session.truncate(begin)
        append(session, begin, 256, tokens=np.array(ids[begin:]))  # where they are, one says so
        assert client.match(model.name, ids).tokens == 256
        if way.startswith("fork"):
            client.open(name, model=model.name)  # for the end
            session.close()


def test_what_is_not_served(client):
    """Refused by the daemon in a sentence."""
    from qkvd.v1.shared_memory_pb2 import CudaSharedMemoryStatusRequest, CudaSharedMemoryStatusResponse

    method = "/qkv.v1.SharedMemory/CudaSharedMemoryStatus"
    with pytest.raises(qkvd.Unimplemented, match="--allow-client-shm"):
        client.call(method, CudaSharedMemoryStatusRequest(), CudaSharedMemoryStatusResponse)


def test_decode_stream(client, model, session, rows, queries):
    k, v = rows(30)
    q = queries(30)
    with client.decode() as stream:
        for i in range(30):
            item = qkvd.Item(
                session=session.name, position=i, k=k[i : i + 1], v=v[i : i + 1], q=q[i : i + 1], options=FLOATS
            )
            (result,) = stream.attend([item])
            assert result.length == i + 1
        np.testing.assert_allclose(result.out, attention(q[29:], k, v, 29)[0], rtol=1e-4, atol=1e-5)
        (failed,) = stream.attend([qkvd.Item(session="nobody", q=q[:1])])
        assert isinstance(failed.error, qkvd.NotFound)
        with pytest.raises(qkvd.InvalidArgument):
            stream.attend([])
        with pytest.raises(qkvd.InvalidArgument):  # has ended with that
            stream.attend([item])
    with client.decode() as stream:
        pass
    with pytest.raises(qkvd.FailedPrecondition, match="closed"):
        stream.attend([item])
    with qkvd.Client(client.target) as other:
        stream = other.decode()
        stream.attend([item])
    with pytest.raises(qkvd.Cancelled, match="the client was closed"):
        stream.attend([item])


def test_arguments(client, session, rows):
    k, v = rows(3)
    shape = {"kv_heads": 1, "q_heads": 1, "key_dim": 8, "value_dim": 8}
    for call, text in (
        (lambda: session.append(0, k.astype(np.int32), v), "k is of int32"),
        (lambda: session.append(0, [1, 2], v), "k is a list"),
        (lambda: session.append(0, k, v, position=-1), "position is -1"),
        (lambda: session.append(0, k, v, rope="sideways"), "rope is 'sideways'"),
        (lambda: session.append(0, k, v, timeout=0), "timeout is 0"),
        (lambda: session.attend(0, k, 0, dtype="fp8"), "dtype is 'fp8'"),
        (lambda: session.fetch(0, part="w"), "part is 'w'"),
        (lambda: session.truncate(0, layers=[]), "layers is empty"),
        (lambda: client.open("x", model="m", purpose="p"), "purpose is 'p'"),
        (lambda: qkvd.Client("http://x"), "target is 'http://x'"),
        (lambda: session.append(0, k[:, :1], v), "the model .* has 2 kv_heads"),
        (lambda: session.append(0, k, v, tokens=[-1, 2, 3]), "token ids are whole numbers from 0 to 4294967295"),
        (lambda: session.append(0, k, v, tokens=[1, 2, 2**32]), "token ids are whole numbers"),
        (lambda: session.append(0, k, v, tokens=[1, 2, 2.5]), "token ids are whole numbers"),
        (lambda: client.open("x", model="m", prefix=[-1]), "token ids are whole numbers"),
        (lambda: session.append(0, k, v, position=2**64), "position is 18446744073709551616, at most"),
        (lambda: session.append(0, k, v, position=1.5), "position is 1.5, it is a whole number"),
        (lambda: session.append("0", k, v), "layer is '0', it is a whole number"),
        (lambda: session.truncate(0.5), "position is 0.5"),
        (lambda: session.attend(0, k, 0, options=qkvd.AttendOptions(sliding_window=-1)), "AttendOptions: .*-1"),
        (lambda: client.open("x", model="m", policy=qkvd.Policy(recent_window=-4)), "Policy: .*-4"),
        (lambda: client.open("x", model="m", policy=qkvd.Policy(bits_k="4")), "Policy: .*str"),  # type: ignore[arg-type]
        (lambda: client.register_model(qkvd.Model(name="m", layers=2**32, **shape)), "Model: .*4294967296"),
        (
            lambda: client.register_model(qkvd.Model(name="m", layers=1, rope=qkvd.Rope(theta=1, width=-2), **shape)),
            "Rope: .*-2",
        ),
        (lambda: next(client.watch(instance=-1)), "instance is -1"),
        (lambda: session.truncate(0, layers=[2**32]), "layers is 4294967296, at most"),
        (lambda: session.fetch(0, begin=0.5), "begin is 0.5"),
        (lambda: client.attend([qkvd.Item(session="x", q=k)], out=[]), "out has 0 entries, there are 1 items"),
        (lambda: client.decode().attend([qkvd.Item(session="x", q=k)], out=[k, k]), "out has 2 entries"),
    ):
        with pytest.raises(qkvd.InvalidArgument, match=text):
            call()


def test_every_field_of_a_policy_has_one_here():
    values = {str: "chain", int: 8, float: 0.5, bool: True}
    fields = {}
    for field in dataclasses.fields(qkvd.Policy):
        kind = typing.get_type_hints(qkvd.Policy)[field.name]
        choices = [kind, *typing.get_args(kind)]
        fields[field.name] = next((values[choice] for choice in choices if choice in values), choices[-1])
    message = qkvd.Policy(**fields).message()
    for field in message.DESCRIPTOR.fields:
        if field.message_type is None:
            assert getattr(message, field.name) == fields[field.name], field.name
            continue
        assert message.HasField(field.name), field.name
        for parameter in field.message_type.fields:
            assert getattr(getattr(message, field.name), parameter.name) != 0, (field.name, parameter.name)


def test_codecs_and_their_parameters(client, name, rows, queries):
    client.register_model(
        qkvd.Model(name=name, layers=1, kv_heads=KV_HEADS, q_heads=Q_HEADS, key_dim=DIM, value_dim=DIM, dtype="fp32")
    )
    policy = qkvd.Policy(
        codec="turboquant",
        codec_v="kivi",
        bits_k=8,
        bits_v=8,
        recent_window=0,
        turboquant_rotation="dense",
        kivi_q_group_size=64,
    )
    k, v = rows(128)
    with client.open(name, model=name, policy=policy) as session:
        session.append(0, k, v)
        out, _ = session.attend(0, queries(1), options=FLOATS)
        fetched = session.fetch(0)
    assert np.all(np.isfinite(out))
    for row, back in zip((k, v), fetched, strict=True):
        assert 0 < np.sum((row - back) ** 2) < 1e-3 * np.sum(row**2)
    stages = qkvd.Policy(
        codec="turboquant-outliers-delta",
        codec_v="polarquant-low-rank",
        bits_k=4,
        bits_v=8,
        recent_window=0,
        turboquant_rotation="dense",
        turboquant_outliers_n_out=8,
        delta_stage_anchor_every=8,
        delta_stage_anchor_threshold=500,
        polarquant_row_norms="none",
        low_rank_stage_rank=1,
    )
    with client.open(f"{name}-stages", model=name, policy=stages) as session:
        session.append(0, k, v)
        k_back, v_back = session.fetch(0)
    assert np.sum((k - k_back) ** 2) < 0.1 * np.sum(k**2) and np.sum((v - v_back) ** 2) < 1e-3 * np.sum(v**2)
    with pytest.raises(qkvd.InvalidArgument, match=r"policy\.delta_stage\.anchor_every is 9"):
        client.open(name, model=name, policy=dataclasses.replace(stages, delta_stage_anchor_every=9))
    with pytest.raises(qkvd.InvalidArgument, match="polarquant"):
        client.open(name, model=name, policy=qkvd.Policy(codec="kivi", bits_k=4, bits_v=4, polarquant_row_norms="none"))
    with pytest.raises(qkvd.InvalidArgument, match="turboquant_rotation is 'skew'"):
        client.open(name, model=name, policy=qkvd.Policy(codec="turboquant", turboquant_rotation="skew"))  # type: ignore[arg-type]


def test_parts_of_different_lengths(client, session, rows, queries):
    """Of rows that go in several messages nothing is appended, as of those that go in one."""

    async def asynchronous(item):
        async with qkvd.AsyncClient(client.target) as one:
            await one.append([item])

    for tokens in (10, 30_000):
        k, v = rows(tokens)
        q = queries(tokens)
        for wrong in ({"v": v[: tokens // 2]}, {"tokens": range(tokens - 1)}, {"tokens": range(tokens + 1)}):
            item = qkvd.Item(**{"session": session.name, "k": k, "v": v} | wrong)
            with pytest.raises(qkvd.InvalidArgument, match=f"{tokens}"):
                client.append([item])
            with pytest.raises(qkvd.InvalidArgument, match=f"{tokens}"):
                asyncio.run(asynchronous(item))
            with pytest.raises(qkvd.InvalidArgument, match=f"{tokens}"):
                session.attend(0, q, k=k, v=v[: tokens // 2])
            assert session.info().lengths == [0, 0]


@pytest.mark.parametrize("tokens", [10, 3000])  # in a call, and in a stream of messages
def test_items_that_cannot_be_sent(client, session, rows, tokens):
    k, v = rows(tokens)
    for wrong, text in (({"layer": -1}, "layer is -1"), ({"rope": "x"}, "rope is 'x'")):
        with pytest.raises(qkvd.InvalidArgument, match=text):
            client.append([qkvd.Item(session=session.name, k=k, v=v, **wrong)])
