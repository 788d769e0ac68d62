"""OpenSession with prefix_token_ids: a session that begins with what another one holds, through the real daemon."""

import threading

import grpc
import numpy as np
import pytest

from daemon import Daemon
from kv import TIMEOUT, Cache, Tenant, refused
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2

LAYERS = 2


def prompt(count, seed=1):
    return [int(x) for x in np.random.default_rng(seed).integers(0, 1 << 32, count)]


def open_with(cache, name, ids, **fields):
    request = kv.OpenSessionRequest(session=name, model=cache.model.name, prefix_token_ids=ids, **fields)
    return cache.stub.OpenSession(request, timeout=TIMEOUT)


def matched(cache, name, ids, **fields):
    """Tokens that the session begins with; it is closed again."""
    answer = open_with(cache, name, ids, **fields)
    assert list(answer.info.lengths) == [answer.matched_tokens] * LAYERS
    Tenant(cache.stub, fields.get("tenant", "")).CloseSession(kv.CloseSessionRequest(session=name), timeout=TIMEOUT)
    return answer.matched_tokens


def close(cache, name, keep=False):
    cache.stub.CloseSession(kv.CloseSessionRequest(session=name, keep=keep), timeout=TIMEOUT)


def fill(cache, ids, position=0):
    for layer in range(LAYERS):
        cache.append(position, *cache.rows(len(ids)), layer=layer, token_ids=ids)


def fetch(cache, name, layer):
    pieces = list(cache.stub.Fetch(kv.FetchRequest(session=name, layers=[layer]), timeout=TIMEOUT))
    return [b"".join(getattr(piece, part).data for piece in pieces) for part in "kv"]


def test_it_begins_with_what_is_held(daemon, make_cache):
    cache = make_cache(layers=LAYERS)
    ids = prompt(1000)
    before = [daemon.metric(f"qkvd_{name}_total") for name in ("prefix_opened_tokens", "forks")]
    name = cache.name + "-new"
    assert matched(cache, name, ids) == 0
    fill(cache, ids[:700])
    answer = open_with(cache, name, ids, ttl_ms=123456789)
    assert answer.matched_tokens == 640 and list(answer.info.lengths) == [640] * LAYERS
    assert answer.info.ttl_ms == 123456789 and answer.info.bytes_shared > 0
    assert [daemon.metric(f"qkvd_{name}_total") for name in ("prefix_opened_tokens", "forks")] == \
        [before[0] + 640, before[1] + 1]
    for layer in range(LAYERS):
        for old, new in zip(fetch(cache, cache.name, layer), fetch(cache, name, layer)):
            assert len(old) * 64 == len(new) * 70 and old.startswith(new)
    # It goes on, is found itself, and outlives the one it came from.
    old_name, cache.name = cache.name, name
    fill(cache, ids[640:], 640)
    cache.name = old_name
    close(cache, cache.name)
    assert matched(cache, name + "er", ids) == 960
    assert matched(cache, name + "er", ids[:100]) == 64
    assert matched(cache, name + "er", ids[:63]) == 0
    assert matched(cache, name + "er", [ids[0] ^ 1] + ids[1:]) == 0


def test_only_what_is_coded_alike_is_shared(daemon, make_cache):
    cache = make_cache(layers=LAYERS, shared=True)
    ids, name = prompt(300), cache.name + "-new"
    fill(cache, ids)
    assert matched(cache, name, ids) == 256
    assert matched(cache, name, ids, tier_bits=2) == 256
    info = cache.info()
    # What the policy resolves to counts, not what is said.
    same = model_pb2.CodecPolicy(bits_k=info.policy.bits_k, recent_window=info.policy.recent_window)
    assert matched(cache, name, ids, policy=same) == 256
    for fields in (dict(policy=model_pb2.CodecPolicy(bits_k=info.policy.bits_k + 1)), dict(purpose=kv.PURPOSE_FETCH),
                   dict(max_attention_error=0.1), dict(keep_full=True), dict(salt=b"x"), dict(tenant="other")):
        assert matched(cache, name, ids, **fields) == 0, fields
    # One that is coded otherwise hides none that is not.
    open_with(cache, name + "-fetched", ids, purpose=kv.PURPOSE_FETCH)
    old_name, cache.name = cache.name, name + "-fetched"
    fill(cache, ids)
    cache.name = old_name
    assert matched(cache, name, ids) == 256
    assert matched(cache, name, ids, purpose=kv.PURPOSE_FETCH) == 256


def test_what_is_refused(daemon, make_cache):
    cache = make_cache(layers=LAYERS)
    ids = prompt(300)
    fill(cache, ids)
    with refused(grpc.StatusCode.ALREADY_EXISTS, "is open already"):
        open_with(cache, cache.name, ids)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "first_position is 7"):
        open_with(cache, "x", ids, first_position=7)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "prefix_token_ids has 4194305 entries, at most 4194304"):
        open_with(cache, "x", [1] * 4194305)
    with refused(grpc.StatusCode.NOT_FOUND, "no model nobody"):
        cache.stub.OpenSession(kv.OpenSessionRequest(session="x", model="nobody", prefix_token_ids=ids), timeout=TIMEOUT)
    # As many as there may be, of which most are more than a request without ids may have.
    assert matched(cache, cache.name + "-new", ids + [1 << 31] * (4194304 - len(ids))) == 256
    # An id that is not packed, and one that is too large.
    raw = daemon.channel().unary_unary("/qkv.v1.KvCache/OpenSession", request_serializer=bytes)
    plain = kv.OpenSessionRequest(session=cache.name + "-raw", model=cache.model.name).SerializeToString()
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "prefix_token_ids[1] is 4294967296, at most 4294967295"):
        raw(plain + b"\x68\x01" + b"\x68\x80\x80\x80\x80\x10", timeout=TIMEOUT)
    raw(plain + b"\x68\x01" * 64, timeout=TIMEOUT)
    assert daemon.stub().Match(kv.MatchRequest(model=cache.model.name, token_ids=ids)).session == cache.name


def test_memory_is_held_once(daemon, make_cache):
    cache = make_cache(layers=LAYERS, kv_heads=4, q_heads=4, key_dim=64, value_dim=64)
    ids = prompt(4096)
    fill(cache, ids)
    before, coded = daemon.metric("qkvd_kv_bytes"), cache.info().bytes_coded
    for i in range(10):
        assert open_with(cache, f"{cache.name}-{i}", ids).matched_tokens == 4096
    assert daemon.metric("qkvd_kv_bytes") - before < coded / 10
    for i in range(10):
        close(cache, f"{cache.name}-{i}")


@pytest.mark.parametrize("durability", [kv.DURABILITY_MEMORY, kv.DURABILITY_ASYNC])
def test_holders_that_change_meanwhile(tmp_path, durability):
    """Rows are a function of their ids, so what a session begins with can be checked."""
    with Daemon("--data-dir", str(tmp_path / "data"), "--storage-segment", "4MiB", "--calibrate-tokens", "0") as daemon:
        cache = Cache(daemon.stub(), "base", layers=LAYERS, durability=durability)
        rng, stop, failures = np.random.default_rng(1), threading.Event(), []
        versions = [prompt(320, seed) for seed in (11, 12)]
        rows = [rng.standard_normal((320, 2, 16)).astype(np.float32) for _ in versions]
        # Both begin with the same 64 tokens.
        versions[1][:64], rows[1][:64] = versions[0][:64], rows[0][:64]

        def append(name, version, position):
            for layer in range(LAYERS):
                item = cache.item(position, rows[version][position:], rows[version][position:], layer=layer,
                                  token_ids=versions[version][position:])
                item.session = name
                cache.stub.Append(iter([kv.AppendRequest(items=[item])]), timeout=TIMEOUT)

        def change():
            try:
                for i in range(150):
                    version = i % 2
                    if i % 5 == 4:
                        close(cache, "base")
                        cache.stub.OpenSession(kv.OpenSessionRequest(session="base", model=cache.model.name,
                                                                     durability=durability), timeout=TIMEOUT)
                        append("base", version, 0)
                    else:
                        cache.stub.Truncate(kv.TruncateRequest(session="base", position=64), timeout=TIMEOUT)
                        append("base", version, 64)
            except Exception as error:  # noqa: BLE001: shown by the main thread
                failures.append(error)
            finally:
                stop.set()

        append("base", 0, 0)
        reference = []
        for version in range(2):
            cache.stub.OpenSession(kv.OpenSessionRequest(session=f"ref{version}", model=cache.model.name, salt=b"r",
                                                         durability=durability), timeout=TIMEOUT)
            append(f"ref{version}", version, 0)
            reference.append([fetch(cache, f"ref{version}", layer) for layer in range(LAYERS)])
        changing = threading.Thread(target=change)
        changing.start()
        opened, begun = 0, set()
        while not stop.is_set():
            version = int(rng.integers(2))
            answer = open_with(cache, f"new{opened}", versions[version], durability=durability)
            count = answer.matched_tokens
            assert list(answer.info.lengths) == [count] * LAYERS
            for layer in range(LAYERS if count else 0):
                for part, whole in zip(fetch(cache, f"new{opened}", layer), reference[version][layer]):
                    # What was sealed has the same codes; what was exact, and is coded later, is close.
                    a, b = np.frombuffer(part, np.float32), np.frombuffer(whole, np.float32)[:len(part) // 4]
                    assert np.corrcoef(a, b)[0, 1] > 0.9, (count, layer)
            close(cache, f"new{opened}")
            begun.add(count)
            opened += 1
        changing.join()
        assert not failures, failures
        assert opened > 20 and max(begun) > 0, begun
        assert open_with(cache, "last", versions[1], durability=durability).matched_tokens == 320


def test_sessions_on_the_ssd(tmp_path):
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-segment", "4MiB")
    ids = prompt(1280)
    with Daemon(*arguments) as daemon:
        cache = Cache(daemon.stub(), "s", layers=LAYERS, durability=kv.DURABILITY_SYNC)
        fill(cache, ids)
        close(cache, "s", keep=True)
        assert matched(cache, "m", ids, durability=kv.DURABILITY_MEMORY) == 0
        assert open_with(cache, "t", ids, durability=kv.DURABILITY_SYNC).matched_tokens == 1280
        before = [fetch(cache, "t", layer) for layer in range(LAYERS)]
        daemon.kill()
    with Daemon(*arguments) as daemon:
        cache.stub = daemon.stub()
        assert [fetch(cache, "t", layer) for layer in range(LAYERS)] == before
