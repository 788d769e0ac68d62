"""Match: the longest prefix of a prompt that any session holds, through the real daemon."""

import json
import subprocess

import grpc
import numpy as np
import pytest

from daemon import PATIENCE, Daemon, binary, clean_environment, wait_for
from kv import TIMEOUT, Cache, Tenant, refused
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2

LAYERS = 2


def prompt(count, seed=1):
    return [int(x) for x in np.random.default_rng(seed).integers(0, 1 << 32, count)]


def open_session(stub, cache, name, tenant="", salt=b"", durability=0):
    stub.OpenSession(kv.OpenSessionRequest(session=name, model=cache.model.name, tenant=tenant, salt=salt,
                                           durability=durability), timeout=TIMEOUT)


def fill(cache, ids, position=0, layers=LAYERS, ids_of=(0,), session=None, tenant=""):
    """Rows for `ids` into layers; the ids come with those of `ids_of`."""
    name, cache.name = cache.name, session or cache.name
    stub, cache.stub = cache.stub, Tenant(cache.stub, tenant)
    try:
        for layer in range(layers):
            cache.append(position, *cache.rows(len(ids)), layer=layer, token_ids=ids if layer in ids_of else [])
    finally:
        cache.name, cache.stub = name, stub


def match(cache, ids, **fields):
    fields.setdefault("model", cache.model.name)
    return cache.stub.Match(kv.MatchRequest(token_ids=ids, **fields), timeout=TIMEOUT)


def found(cache, ids, **fields):
    answer = match(cache, ids, **fields)
    assert answer.tokens_in_memory + answer.tokens_on_ssd == answer.tokens
    assert (answer.tokens > 0) == (answer.session != "")
    return answer.session, answer.tokens


def test_the_longest_prefix_is_found(daemon, make_cache):
    cache = make_cache(layers=LAYERS)
    ids = prompt(1000)
    assert found(cache, ids) == ("", 0)
    fill(cache, ids[:300])
    assert found(cache, ids) == (cache.name, 256)
    assert found(cache, ids[:256]) == (cache.name, 256)
    assert found(cache, ids[:255]) == (cache.name, 192)
    assert found(cache, ids[:63]) == ("", 0)
    assert found(cache, []) == ("", 0)
    assert found(cache, ids[:100] + prompt(500, 2)) == (cache.name, 64)
    assert found(cache, [ids[0] ^ 1] + ids[1:]) == ("", 0)
    fill(cache, ids[300:700], position=300)
    assert found(cache, ids) == (cache.name, 640)
    answer = match(cache, ids)
    assert (answer.tokens_in_memory, answer.tokens_on_ssd, answer.restore_ms) == (640, 0, 0)
    info = cache.stub.GetSession(kv.GetSessionRequest(session=cache.name), timeout=TIMEOUT)
    assert answer.prefix_root == info.prefix_root == match(cache, []).prefix_root
    assert match(cache, ids, salt=b"another").prefix_root != info.prefix_root


def test_truncation_and_closing_end_a_match(daemon, make_cache):
    cache = make_cache(layers=LAYERS)
    ids, other = prompt(400), prompt(400, 2)
    fill(cache, ids)
    cache.stub.Truncate(kv.TruncateRequest(session=cache.name, position=200), timeout=TIMEOUT)
    assert found(cache, ids) == (cache.name, 192)
    fill(cache, other[:100], position=200)
    assert found(cache, ids[:200] + other) == (cache.name, 256)
    assert found(cache, ids) == (cache.name, 192)
    # One layer alone: the ids go with its rows.
    cache.stub.Truncate(kv.TruncateRequest(session=cache.name, position=64, layers=[1]), timeout=TIMEOUT)
    assert found(cache, ids) == (cache.name, 64)
    cache.stub.CloseSession(kv.CloseSessionRequest(session=cache.name), timeout=TIMEOUT)
    assert found(cache, ids) == ("", 0)


def test_only_what_all_layers_hold_counts(daemon, make_cache):
    cache = make_cache(layers=LAYERS)
    ids = prompt(300)
    fill(cache, ids, layers=1)
    assert found(cache, ids) == ("", 0)
    cache.append(0, *cache.rows(150), layer=1)
    assert found(cache, ids) == (cache.name, 128)
    cache.append(150, *cache.rows(150), layer=1, token_ids=ids[150:])  # the same: they are compared
    assert found(cache, ids) == (cache.name, 256)
    # Of two that share it the one whose layers have it all.
    open_session(cache.stub, cache, cache.name + "b")
    fill(cache, ids, layers=1, session=cache.name + "b")
    assert found(cache, ids) == (cache.name, 256)


def test_ids_may_come_with_any_layer(daemon, make_cache):
    cache = make_cache(layers=LAYERS)
    ids = prompt(200)
    fill(cache, ids, ids_of=(1,))
    assert found(cache, ids) == (cache.name, 192)


def test_ids_come_with_attends_and_decode_steps(daemon, make_cache):
    cache = make_cache(layers=1)
    ids = prompt(200)
    for i in range(70):
        cache.attend(i, cache.queries(1), k=cache.rows(1)[0], v=cache.rows(1)[1], token_ids=ids[i:i + 1])
    assert found(cache, ids) == (cache.name, 64)

    def steps():
        for i in range(70, 200):
            k, v = cache.rows(1)
            yield kv.AttendRequest(items=[cache.item(i, k, v, cache.queries(1), token_ids=ids[i:i + 1])])

    assert [answer.results[0].status.code for answer in cache.stub.Decode(steps(), timeout=TIMEOUT)] == [0] * 130
    assert found(cache, ids) == (cache.name, 192)


def test_models_tenants_and_salts_never_meet(daemon, make_cache):
    cache, other = make_cache(layers=LAYERS, shared=True), make_cache(layers=LAYERS)
    ids = prompt(128)
    fill(cache, ids)
    sessions = {("", b""): cache.name}
    for tenant, salt in (("t", b""), ("", b"a"), ("t", b"a"), ("", b"\0"), ("", bytes(range(256)))):
        sessions[tenant, salt] = f"{cache.name}-{len(sessions)}"
        open_session(cache.stub, cache, sessions[tenant, salt], tenant, salt)
        fill(cache, ids, session=sessions[tenant, salt], tenant=tenant)
    for (tenant, salt), session in sessions.items():
        assert found(cache, ids, tenant=tenant, salt=salt) == (session, 128)
    assert found(cache, ids, tenant="default") == (cache.name, 128)
    assert found(cache, ids, tenant="u") == ("", 0)
    assert found(cache, ids, salt=b"b") == ("", 0)
    assert found(other, ids) == ("", 0)
    with refused(grpc.StatusCode.NOT_FOUND, "no model nobody"):
        match(cache, ids, model="nobody")
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "salt is 257 bytes, at most 256"):
        match(cache, ids, salt=bytes(257))
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "salt is 257 bytes, at most 256"):
        open_session(cache.stub, cache, "x", salt=bytes(257))
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "tenant"):
        match(cache, ids, tenant="no name")
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "token_ids has 4194305 entries, at most 4194304"):
        match(cache, [1] * 4194305)
    assert found(cache, ids + [1] * (4194304 - len(ids))) == (cache.name, 128)


def test_wrong_ids_are_refused_and_change_nothing(daemon, make_cache):
    cache = make_cache(layers=LAYERS)
    ids = prompt(200)
    fill(cache, ids[:130])
    before = cache.state()
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "items[0].token_ids has 9 entries, k has 10 tokens"):
        cache.append(130, *cache.rows(10), token_ids=ids[130:139])
    wrong = ids[:70] + [5] + ids[71:]
    with refused(grpc.StatusCode.ALREADY_EXISTS, f"position 70 has token id {ids[70]}, token_ids[10] is 5"):
        cache.append(60, *cache.rows(100), layer=1, token_ids=wrong[60:160])
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "130"):
        cache.append(140, *cache.rows(60), token_ids=ids[140:])
    assert cache.state() == before
    assert found(cache, ids) == (cache.name, 128)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "token_ids has 3 entries, k has 0 tokens"):
        cache.attend(130, cache.queries(1), token_ids=[1, 2, 3])


def test_a_gap_ends_what_is_matched(daemon, make_cache):
    cache = make_cache(layers=LAYERS)
    ids = prompt(400)
    fill(cache, ids[:100])
    fill(cache, ids[100:101], position=100, ids_of=())
    fill(cache, ids[101:], position=101)
    assert found(cache, ids) == (cache.name, 64)
    later = make_cache(layers=LAYERS, first_position=64)
    fill(later, ids[64:], position=64)
    assert found(later, ids) == ("", 0)


def test_ids_count_as_memory_and_metrics_tell(make_cache):
    with Daemon() as daemon:
        cache = Cache(daemon.stub(), "s", layers=LAYERS)
        ids = prompt(6400)
        fill(cache, ids, ids_of=())
        without = daemon.metric("qkvd_kv_bytes")
        assert daemon.metric("qkvd_prefix_pages") == 0
        cache.stub.CloseSession(kv.CloseSessionRequest(session="s"), timeout=TIMEOUT)
        empty = daemon.metric("qkvd_kv_bytes")
        cache = Cache(daemon.stub(), "s", layers=LAYERS)
        fill(cache, ids)
        assert daemon.metric("qkvd_kv_bytes") - without == 100 * 320
        assert daemon.metric("qkvd_prefix_pages") == 100
        assert daemon.metric("qkvd_prefix_bytes") > 0
        assert found(cache, ids[:1000]) == ("s", 960)
        assert found(cache, prompt(1000, 9)) == ("", 0)
        for name, value in (("match", 2), ("match_hits", 1), ("asked_tokens", 2000), ("matched_tokens", 960)):
            assert daemon.metric(f"qkvd_prefix_{name}_total") == value
        cache.stub.CloseSession(kv.CloseSessionRequest(session="s"), timeout=TIMEOUT)
        wait_for(lambda: daemon.metric("qkvd_kv_bytes") == empty, "the memory of ids to go back")
        assert daemon.metric("qkvd_prefix_pages") == 0


@pytest.mark.parametrize("limit,tokens", [(0, 0), (3, 128)])
def test_the_index_has_a_limit(limit, tokens):
    with Daemon("--limit-prefixes", str(limit)) as daemon:
        cache = Cache(daemon.stub(), "s", layers=LAYERS)
        ids = prompt(640)
        fill(cache, ids)
        assert found(cache, ids)[1] == tokens
        assert daemon.metric("qkvd_prefix_refused_total") > 0
        # Sessions go on all the same.
        assert list(cache.info().lengths) == [640] * LAYERS


def test_sunk_sessions_are_found(tmp_path):
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-segment", "4MiB")
    with Daemon(*arguments) as daemon:
        cache = Cache(daemon.stub(), "s", layers=LAYERS, durability=kv.DURABILITY_SYNC)
        open_session(daemon.stub(), cache, "salted", salt=b"salt", durability=kv.DURABILITY_SYNC)
        ids = prompt(6400)
        fill(cache, ids)
        fill(cache, ids[:640], session="salted")
        cache.stub.CloseSession(kv.CloseSessionRequest(session="s", keep=True), timeout=TIMEOUT)
        answer = match(cache, ids)
        assert (answer.session, answer.tokens) == ("s", 6400)
        assert (answer.tokens_in_memory, answer.tokens_on_ssd) == (0, 6400)
        assert 0 < answer.restore_ms < 60000
        cache.fetch(layers=(0,))
        answer = match(cache, ids)
        assert (answer.tokens_in_memory, answer.tokens_on_ssd) == (0, 6400)  # layer 1 is still there
        cache.fetch(layers=(1,))
        answer = match(cache, ids)
        assert (answer.tokens_in_memory, answer.tokens_on_ssd, answer.restore_ms) == (6400, 0, 0)
        # Of two the one in memory.
        open_session(daemon.stub(), cache, "warm", durability=kv.DURABILITY_SYNC)
        cache.stub.CloseSession(kv.CloseSessionRequest(session="s", keep=True), timeout=TIMEOUT)
        fill(cache, ids[:640], session="warm")
        assert found(cache, ids[:640]) == ("warm", 640)
        cache.stub.CloseSession(kv.CloseSessionRequest(session="warm", keep=True), timeout=TIMEOUT)
        roots = {name: daemon.stub().GetSession(kv.GetSessionRequest(session=name)).prefix_root
                 for name in ("s", "salted")}
        assert len(set(roots.values())) == 2 and all(len(root) == 16 for root in roots.values())
    with Daemon(*arguments) as daemon:
        for name, root in roots.items():
            assert daemon.stub().GetSession(kv.GetSessionRequest(session=name)).prefix_root == root


@pytest.mark.parametrize("layers", [1, LAYERS])
def test_exact_rows_keep_their_ids_when_the_daemon_is_killed(tmp_path, layers):
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-segment", "4MiB")
    ids, other = prompt(400), prompt(400, 2)
    with Daemon(*arguments) as daemon:
        cache = Cache(daemon.stub(), "exact", layers=layers, durability=kv.DURABILITY_SYNC,
                      policy=model_pb2.CodecPolicy(codec="exact"))
        fill(cache, ids[:200], layers=layers)
        fill(cache, ids[200:330], position=200, layers=layers, ids_of=(0, 1))
        cache.stub.Fork(kv.ForkRequest(session="exact", fork="fork", position=100), timeout=TIMEOUT)
        fill(cache, other[:100], position=100, layers=layers, session="fork")
        if layers > 1:  # of the last layer the rows stay, but not what they were computed from
            open_session(cache.stub, cache, "cut", durability=kv.DURABILITY_SYNC)
            fill(cache, other, layers=layers, session="cut")
            cache.stub.Truncate(kv.TruncateRequest(session="cut", position=150, layers=[0]), timeout=TIMEOUT)
            fill(cache, ids[150:], position=150, layers=1, session="cut")
        daemon.kill()
    with Daemon(*arguments) as daemon:
        cache.stub = daemon.stub()
        assert found(cache, ids) == ("exact", 320)
        assert found(cache, ids[:100] + other) == ("fork", 192)
        if layers > 1:
            assert found(cache, other) == ("cut", 128)
        # Appends go on where the ids end, and wrong ones are refused.
        with refused(grpc.StatusCode.ALREADY_EXISTS, "position 329"):
            fill(cache, [ids[329] ^ 1], position=329, layers=1)
        fill(cache, ids[330:], position=330, layers=layers)
        assert found(cache, ids) == ("exact", 384)
        held = cache.stub.GetSession(kv.GetSessionRequest(session="exact", token_ids={"begin": 0, "end": 0}), timeout=TIMEOUT)
        assert list(held.token_ids) == ids


def test_ids_of_exact_rows_follow_pages_when_the_daemon_is_killed(tmp_path):
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-segment", "4MiB")
    ids = prompt(400)
    with Daemon(*arguments) as daemon:
        cache = Cache(daemon.stub(), "s", layers=LAYERS, durability=kv.DURABILITY_SYNC, recent_window=100)
        fill(cache, ids[:330])
        daemon.kill()
    with Daemon(*arguments) as daemon:
        cache.stub = daemon.stub()
        assert found(cache, ids) == ("s", 320)
        fill(cache, ids[330:], position=330)
        assert found(cache, ids) == ("s", 384)


@pytest.mark.parametrize("layers, ids_of", [(1, (0,)), (LAYERS, (LAYERS - 1,))], ids=["one layer", "the last layer"])
@pytest.mark.parametrize("coded", [False, True], ids=["rows", "pages"])
def test_ids_that_come_with_the_layer_that_is_written_with_them(tmp_path, layers, ids_of, coded):
    """The append that brings the ids is the one that codes the pages, and they are on the SSD before it is answered."""
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-segment", "4MiB")
    ids = prompt(330)
    with Daemon(*arguments) as daemon:
        cache = Cache(daemon.stub(), "s", layers=layers, durability=kv.DURABILITY_SYNC)
        fill(cache, ids[:150], layers=layers, ids_of=ids_of)
        fill(cache, ids[150:], position=150, layers=layers, ids_of=ids_of)
        if coded:
            open_session(cache.stub, cache, "copy", durability=kv.DURABILITY_SYNC)
            for layer in range(layers):
                pieces = cache.stub.Fetch(kv.FetchRequest(session="s", layers=[layer], coded=True), timeout=TIMEOUT)
                pages = [page for piece in pieces for page in piece.pages]
                given = ids[:sum(page.tokens for page in pages)] if layer in ids_of else []
                item = kv.Item(session="copy", layer=layer, pages=pages, token_ids=given)
                cache.stub.Append(iter([kv.AppendRequest(items=[item])]), timeout=TIMEOUT)
            cache.stub.CloseSession(kv.CloseSessionRequest(session="s"), timeout=TIMEOUT)
        before = found(cache, ids)
        assert before[1] >= 256
        daemon.kill()
    with Daemon(*arguments) as daemon:
        cache.stub = daemon.stub()
        assert found(cache, ids) == before


def qkvctl(daemon, *arguments, stdin=""):
    return subprocess.run([binary("qkvctl"), *arguments, "--target", daemon.target], env=clean_environment(), input=stdin,
                          capture_output=True, text=True, timeout=PATIENCE)


def test_qkvctl_match(daemon, make_cache, tmp_path):
    cache = make_cache(layers=LAYERS)
    ids = prompt(300)
    open_session(cache.stub, cache, cache.name + "-salted", salt=b"a b")
    fill(cache, ids, session=cache.name + "-salted")
    arguments = ("match", "--model", cache.model.name, "--salt", "a b", "--tokens")
    for text in (json.dumps(ids), " ".join(map(str, ids)), "\n".join(map(str, ids)) + "\n", ",".join(map(str, ids))):
        (tmp_path / "ids").write_text(text)
        for result in (qkvctl(daemon, *arguments, str(tmp_path / "ids"), "--json"),
                       qkvctl(daemon, *arguments, "-", "--json", stdin=text)):
            assert result.returncode == 0, result.stderr
            assert json.loads(result.stdout) == {"session": cache.name + "-salted", "tokens": 256,
                                                 "tokens_in_memory": 256, "tokens_on_ssd": 0, "restore_ms": 0.0}
    shown = qkvctl(daemon, *arguments, "-", stdin=text)
    assert shown.stdout == f"{cache.name}-salted: 256 tokens, 256 in memory, 0 on the SSD\n"
    assert qkvctl(daemon, *arguments, "-").stdout == "no session shares 64 tokens\n"
    for wrong in ("1 2 x", "1 -2", "1 4294967296", "1 99999999999999999999", "1 2.5"):
        result = qkvctl(daemon, *arguments, "-", stdin=wrong)
        assert (result.returncode, result.stdout) == (1, "")
        assert "is no number from 0 to 4294967295" in result.stderr
    assert "No such file" in qkvctl(daemon, *arguments, str(tmp_path / "nowhere")).stderr
    assert "no model nobody" in qkvctl(daemon, "match", "--model", "nobody", "--tokens", "-").stderr


def test_sessions_larger_than_memory_keep_their_ids(tmp_path):
    with Daemon("--data-dir", str(tmp_path / "data"), "--storage-segment", "4MiB", "--memory-budget", "16MiB",
                "--calibrate-tokens", "0") as daemon:
        caches = {}
        for i in range(10):
            caches[i] = Cache(daemon.stub(), f"s{i}", layers=LAYERS, kv_heads=4, key_dim=64, value_dim=64, seed=i)
            for begin in range(0, 6400, 640):
                fill(caches[i], prompt(6400, i)[begin:begin + 640], position=begin)
        assert daemon.metric("qkvd_storage_evicted_bytes_total") > 0
        assert daemon.metric("qkvd_prefix_pages") == 10 * 100
        answers = [match(cache, prompt(6400, i)) for i, cache in caches.items()]
        assert [(answer.session, answer.tokens) for answer in answers] == [(f"s{i}", 6400) for i in range(10)]
        assert any(answer.tokens_on_ssd > 0 and answer.restore_ms > 0 for answer in answers)
        # The same rows and ids again: what left memory comes back to be compared.
        cold = max(range(10), key=lambda i: answers[i].tokens_on_ssd)
        with refused(grpc.StatusCode.ALREADY_EXISTS, "position 6000"):
            fill(caches[cold], prompt(6400, cold)[:6000] + [1], layers=1)
