"""Models and sessions: registering, opening, listing, what is told about them, truncating, closing."""

import time

import grpc
import numpy as np
import pytest

from daemon import Daemon, wait_for
from kv import FP16, FP32, TIMEOUT, Cache, array_of, refused
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2


def register(stub, **fields):
    return stub.RegisterModel(model_pb2.RegisterModelRequest(model=model_pb2.Model(**fields)), timeout=TIMEOUT).model


def open_session(stub, session, model, **fields):
    return stub.OpenSession(kv.OpenSessionRequest(session=session, model=model, **fields), timeout=TIMEOUT).info


GEOMETRY = {"layers": 3, "kv_heads": 2, "q_heads": 8, "key_dim": 64, "value_dim": 32, "dtype": FP16}


def test_registered_model_comes_back_with_defaults(stub, name):
    model = register(stub, name=name, rope=model_pb2.Rope(theta=10000), **GEOMETRY)
    assert model.scale == pytest.approx(64 ** -0.5)
    assert model.rope.width == 64
    assert (model.layers, model.kv_heads, model.q_heads, model.key_dim, model.value_dim) == (3, 2, 8, 64, 32)
    answer = stub.GetModel(model_pb2.GetModelRequest(name=name), timeout=TIMEOUT)
    assert answer.model == model
    assert answer.sessions == 0


def test_same_model_again_is_acknowledged_another_is_refused(stub, name):
    register(stub, name=name, **GEOMETRY)
    register(stub, name=name, **GEOMETRY)
    register(stub, name=name, scale=64 ** -0.5, **GEOMETRY)  # the default, said
    with refused(grpc.StatusCode.ALREADY_EXISTS, name):
        register(stub, name=name, **{**GEOMETRY, "layers": 4})
    assert stub.GetModel(model_pb2.GetModelRequest(name=name), timeout=TIMEOUT).model.layers == 3


def test_models_are_listed_by_name_with_their_sessions(stub, name):
    for suffix in "bac":
        register(stub, name=f"{name}-{suffix}", **GEOMETRY)
    open_session(stub, f"{name}-1", f"{name}-b")
    models = stub.ListModels(model_pb2.ListModelsRequest(), timeout=TIMEOUT).models
    ours = [(entry.model.name, entry.sessions) for entry in models if entry.model.name.startswith(name)]
    assert ours == [(f"{name}-a", 0), (f"{name}-b", 1), (f"{name}-c", 0)]


def test_session_info_is_resolved(stub, name):
    register(stub, name=name, policy=model_pb2.CodecPolicy(bits_k=3), **GEOMETRY)
    before = time.time() * 1000
    info = open_session(stub, name, name, first_position=7, policy=model_pb2.CodecPolicy(bits_v=2, recent_window=0))
    assert (info.session, info.model, info.tenant, info.purpose) == (name, name, "default", kv.PURPOSE_ATTEND)
    assert (info.policy.codec, info.policy.bits_k, info.policy.bits_v) == ("embedded", 3, 2)
    assert info.policy.HasField("recent_window") and info.policy.recent_window == 0
    assert list(info.lengths) == [7, 7, 7]
    assert info.durability == kv.DURABILITY_MEMORY
    assert before - 1000 <= info.created_unix_ms <= time.time() * 1000 + 1000
    assert info.bytes_coded == info.bytes_exact == info.tokens_coded == info.tokens_exact == 0
    assert stub.GetSession(kv.GetSessionRequest(session=name), timeout=TIMEOUT).policy == info.policy


def test_session_counts_tokens_and_bytes(make_cache):
    cache = make_cache(layers=2, recent_window=10, bits_k=4, bits_v=2)
    k, v = cache.rows(200)
    cache.append(0, k, v)
    info = cache.info()
    assert list(info.lengths) == [200, 0]
    # 200 tokens less the window of 10: two whole pages lie below.
    assert (info.tokens_coded, info.tokens_exact) == (128, 72)
    coordinates = 2 * (16 + 16)
    assert info.bytes_fp16 == 200 * coordinates * 2
    assert info.bits_per_coordinate == pytest.approx(8 * info.bytes_coded / (128 * coordinates))
    assert info.bits_per_coordinate >= 3
    assert info.bytes_exact >= 72 * coordinates * 4
    assert cache.stub.CloseSession(kv.CloseSessionRequest(session=cache.name),
                                   timeout=TIMEOUT).bytes_freed == (
                                       info.bytes_coded + info.bytes_exact + info.bytes_overhead)


def test_duplicate_session_is_refused_until_it_is_closed(stub, name):
    register(stub, name=name, **GEOMETRY)
    open_session(stub, name, name)
    with refused(grpc.StatusCode.ALREADY_EXISTS, name):
        open_session(stub, name, name)
    stub.CloseSession(kv.CloseSessionRequest(session=name), timeout=TIMEOUT)
    with refused(grpc.StatusCode.NOT_FOUND, name):
        stub.GetSession(kv.GetSessionRequest(session=name), timeout=TIMEOUT)
    with refused(grpc.StatusCode.NOT_FOUND, name):
        stub.CloseSession(kv.CloseSessionRequest(session=name), timeout=TIMEOUT)
    open_session(stub, name, name)


def listed(stub, **fields):
    """Names of all pages, and how many pages there were."""
    names, pages, token = [], 0, ""
    while True:
        answer = stub.ListSessions(kv.ListSessionsRequest(page_token=token, **fields), timeout=TIMEOUT)
        names += [session.session for session in answer.sessions]
        pages, token = pages + 1, answer.next_page_token
        if not token:
            return names, pages
        assert len(answer.sessions) == fields["page_size"]


def test_sessions_are_listed_in_pages(stub, name):
    register(stub, name=f"{name}-m", **GEOMETRY, shared=True)
    register(stub, name=f"{name}-n", **GEOMETRY, shared=True)
    names = [f"{name}/{index:02}" for index in range(25)]
    for index in np.random.default_rng(1).permutation(25):
        open_session(stub, names[index], f"{name}-{'mn'[index % 2]}", tenant=f"tenant-{index % 3}")
    assert listed(stub, prefix=f"{name}/") == (names, 1)
    found, pages = listed(stub, prefix=f"{name}/", page_size=10)
    assert found == names and pages == 3
    assert listed(stub, prefix=f"{name}/", page_size=7, model=f"{name}-n")[0] == names[1::2]
    assert listed(stub, prefix=f"{name}/", page_size=2, tenant="tenant-1")[0] == names[1::3]
    assert listed(stub, prefix=f"{name}/none") == ([], 1)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "page_size", "1001", "1000"):
        listed(stub, page_size=1001)


def test_pages_survive_a_session_that_is_closed_between_them(stub, name):
    register(stub, name=name, **GEOMETRY)
    for index in range(4):
        open_session(stub, f"{name}/{index}", name)
    first = stub.ListSessions(kv.ListSessionsRequest(prefix=f"{name}/", page_size=2), timeout=TIMEOUT)
    stub.CloseSession(kv.CloseSessionRequest(session=first.sessions[1].session), timeout=TIMEOUT)
    second = stub.ListSessions(kv.ListSessionsRequest(prefix=f"{name}/", page_token=first.next_page_token),
                               timeout=TIMEOUT)
    assert [session.session for session in second.sessions] == [f"{name}/2", f"{name}/3"]


@pytest.mark.parametrize("position", [0, 1, 63, 64, 100, 128, 199, 200, 1000])
def test_truncate(make_cache, position):
    cache = make_cache(layers=2, recent_window=0)
    k, v = cache.rows(200)
    for layer in (0, 1):
        cache.append(0, k, v, layer=layer)
    before, _ = cache.fetch()
    answer = cache.stub.Truncate(kv.TruncateRequest(session=cache.name, position=position, layers=[0]),
                                 timeout=TIMEOUT)
    kept = min(position, 200)
    assert list(answer.lengths) == [kept, 200] == list(cache.info().lengths)
    if kept:
        assert np.array_equal(cache.fetch()[0], before[:kept])
    # What was dropped can come again, and differently.
    k2, v2 = cache.rows(70)
    assert cache.append(kept, k2, v2).tokens == 70
    assert list(cache.info().lengths) == [kept + 70, 200]
    after, _ = cache.fetch()
    sealed = min(kept, 128)  # beyond it rows were exact, and may have been coded since
    assert np.array_equal(after[:sealed], before[:sealed])
    expected = np.concatenate([before[sealed:kept], k2])
    assert np.linalg.norm(after[sealed:] - expected) < 0.2 * np.linalg.norm(expected)


def test_truncate_all_layers_frees_memory(make_cache):
    cache = make_cache(layers=2)
    k, v = cache.rows(200)
    for layer in (0, 1):
        cache.append(0, k, v, layer=layer)
    assert list(cache.stub.Truncate(kv.TruncateRequest(session=cache.name), timeout=TIMEOUT).lengths) == [0, 0]
    info = cache.info()
    assert info.bytes_coded == info.bytes_exact == 0
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "layer", "2"):
        cache.stub.Truncate(kv.TruncateRequest(session=cache.name, layers=[2]), timeout=TIMEOUT)


def test_fetch_pieces_layers_and_layouts(make_cache):
    cache = make_cache(layers=3, recent_window=1000, dtype=FP32)
    rows = {}
    for layer, tokens in ((0, 130), (2, 70)):
        rows[layer] = cache.rows(tokens)
        cache.append(0, *rows[layer], layer=layer)
    request = kv.FetchRequest(session=cache.name, layers=[2, 0, 1], chunk_tokens=50, dtype=FP32)
    pieces = list(cache.stub.Fetch(request, timeout=TIMEOUT))
    # Pieces hold 50 tokens at most and end where pages do, layers in the order asked for; an empty layer sends nothing.
    assert [(piece.layer, piece.position) for piece in pieces if piece.k.dims] == [
        (2, 0), (2, 50), (2, 64), (0, 0), (0, 50), (0, 64), (0, 114), (0, 128)]
    request = kv.FetchRequest(session=cache.name, layers=[0], dtype=FP32, layout=kv.ROW_LAYOUT_HEADS_FIRST,
                              part=kv.FetchRequest.PART_V)
    request.range.begin, request.range.end = 60, 128
    pieces = list(cache.stub.Fetch(request, timeout=TIMEOUT))
    assert all(not piece.HasField("k") for piece in pieces)
    found = np.concatenate([array_of(piece.v) for piece in pieces], axis=1)
    assert np.array_equal(found, rows[0][1][60:128].transpose(1, 0, 2))


def test_sessions_expire(make_cache, daemon):
    lasting, passing = make_cache(), make_cache()
    for cache, ttl_ms in ((lasting, 3600_000), (passing, 2000)):
        cache.append(0, *cache.rows(100))
        cache.stub.Touch(kv.TouchRequest(session=cache.name, ttl_ms=ttl_ms), timeout=TIMEOUT)
    assert lasting.info().ttl_ms == 3600_000
    wait_for(lambda: daemon.metric("qkvd_sessions_expired_total") == 1, "no session has expired")
    with refused(grpc.StatusCode.NOT_FOUND, passing.name):
        passing.info()
    lasting.stub.Touch(kv.TouchRequest(session=lasting.name), timeout=TIMEOUT)  # leaves the time as it is
    assert lasting.info().ttl_ms == 3600_000


def test_memory_of_closed_sessions_goes_back_to_the_machine():
    with Daemon("--memory-budget", "1GiB") as daemon:
        caches = [Cache(daemon.stub(), name, kv_heads=4, q_heads=32, key_dim=128, value_dim=128, recent_window=100000)
                  for name in ("first", "second")]
        for cache in caches:
            for position in range(0, 8192, 1024):
                cache.append(position, *cache.rows(1024))
        assert daemon.metric("qkvd_kv_bytes") >= 64 << 20
        for cache in caches:
            cache.stub.CloseSession(kv.CloseSessionRequest(session=cache.name), timeout=TIMEOUT)
        assert daemon.metric("qkvd_kv_bytes") == 0
        wait_for(lambda: daemon.metric("qkvd_kv_resident_bytes") <= 16 << 20, "the memory is kept")


def test_pin(make_cache):
    cache = make_cache()
    cache.stub.Pin(kv.PinRequest(session=cache.name), timeout=TIMEOUT)
    assert cache.info().pinned
    cache.stub.Pin(kv.PinRequest(session=cache.name, unpin=True), timeout=TIMEOUT)
    assert not cache.info().pinned
    with refused(grpc.StatusCode.NOT_FOUND, "nothing"):
        cache.stub.Pin(kv.PinRequest(session="nothing"), timeout=TIMEOUT)
