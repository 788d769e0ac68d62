"""Two tenants whose sessions have the same names: in memory, on the SSD, after kill -9, and through every call."""

import copy
import json
import os
import subprocess
import time

import grpc
import numpy as np
import pytest

from daemon import PATIENCE, Daemon, binary, clean_environment, wait_for
from kv import FP16, TIMEOUT, Cache, Tenant, refused
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2, objects_pb2, objects_pb2_grpc

LAYERS = 2
TENANTS = {"": 300, "other": 500}  # tokens of each one's session
NONE, SSD = kv.HasSessionsResponse.PRESENCE_NONE, kv.HasSessionsResponse.PRESENCE_SSD


def fill(cache, tokens):
    cache.ids = list(range(tokens))
    cache.filled = [cache.rows(tokens) for _ in range(LAYERS)]
    for layer, rows in enumerate(cache.filled):
        cache.append(0, *rows, layer=layer, token_ids=cache.ids)


def open_pair(daemon, name, **fields):
    """The same name for two tenants, with other rows for each."""
    pair = []
    for seed, (tenant, tokens) in enumerate(TENANTS.items()):
        cache = Cache(Tenant(daemon.stub(), tenant), name, layers=LAYERS, seed=seed, **fields)
        cache.tenant = tenant or "default"
        fill(cache, tokens)
        cache.before = rows_of(cache)
        pair.append(cache)
    return pair


def rows_of(cache):
    return [array for layer in range(LAYERS) for array in cache.fetch(layers=(layer,))]


def assert_same(cache, rows=None):
    for now, before in zip(rows_of(cache), cache.before if rows is None else rows, strict=True):
        assert np.array_equal(now, before)


def call(cache, method, request):
    return getattr(cache.stub, method)(request, timeout=TIMEOUT)


def has(cache, *names, **fields):
    return call(cache, "HasSessions", kv.HasSessionsRequest(sessions=names, tokens=True, **fields))


def listed(stub, **fields):
    """(name, tenant) of all pages, two sessions each."""
    found, token = [], ""
    while True:
        answer = stub.ListSessions(kv.ListSessionsRequest(page_token=token, page_size=2, **fields), timeout=TIMEOUT)
        found += [(info.session, info.tenant) for info in answer.sessions]
        token = answer.next_page_token
        if not token:
            return found


@pytest.fixture
def start(tmp_path):
    """Daemons on one data directory, one after the other."""

    def make(*arguments):
        return Daemon("--data-dir", str(tmp_path / "data"), "--calibrate-tokens", "0", *arguments)

    return make


# ---- Every call ----


def test_each_reads_its_own(daemon, name):
    pair = open_pair(daemon, name)
    for cache in pair:
        tokens = len(cache.ids)
        info = cache.info()
        assert (info.session, info.tenant, list(info.lengths)) == (name, cache.tenant, [tokens] * LAYERS)
        assert list(has(cache, "nobody", name, touch=True).tokens) == [0, tokens]
        match = call(cache, "Match", kv.MatchRequest(model=cache.model.name, token_ids=range(1000)))
        assert (match.session, match.tokens) == (name, tokens // 64 * 64)
        stats = list(call(cache, "GetAttentionStats", kv.GetAttentionStatsRequest(session=name)))
        assert [len(one.ema) for one in stats] == [tokens] * len(stats) and stats
        request = kv.AttendRequest(items=[cache.item(250, q=cache.queries(1))])
        for results in (call(cache, "Attend", request), *cache.stub.Decode(iter([request] * 2), timeout=TIMEOUT)):
            assert [(one.status.code, one.length) for one in results.results] == [(0, tokens)]
        opened = call(cache, "OpenSession", kv.OpenSessionRequest(
            session=name + "-more", model=cache.model.name, prefix_token_ids=range(1000)))
        assert (opened.matched_tokens, opened.info.tenant) == (tokens // 64 * 64, cache.tenant)
        with refused(grpc.StatusCode.ALREADY_EXISTS, f"the session {name} is open already"):
            call(cache, "OpenSession", kv.OpenSessionRequest(session=name, model=cache.model.name))
    own, other = (cache.fetch()[0] for cache in pair)
    assert not np.array_equal(own, other[:300])


def test_each_changes_its_own(daemon, name):
    own, other = open_pair(daemon, name, bits_k=4, bits_v=4, recent_window=0)
    fork = copy.copy(other)
    fork.name = name + "-fork"
    call(other, "Fork", kv.ForkRequest(session=name, fork=fork.name, position=320))
    with refused(grpc.StatusCode.NOT_FOUND, f"no session {fork.name}"):
        call(own, "GetSession", kv.GetSessionRequest(session=fork.name))
    state = own.state()
    call(other, "Pin", kv.PinRequest(session=name))
    call(other, "Touch", kv.TouchRequest(session=name, ttl_ms=100000))
    info = other.info()
    assert info.pinned and info.ttl_ms == 100000
    call(other, "Demote", kv.DemoteRequest(session=name, bits=2, even=True))
    assert not np.array_equal(other.fetch()[0], other.before[0])
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "were not kept"):
        call(other, "Prefetch", kv.PrefetchRequest(session=name))
    call(other, "Truncate", kv.TruncateRequest(session=name, position=100))
    other.append(100, *other.rows(5))
    assert list(other.info().lengths) == [105, 100]
    assert own.state() == state
    assert_same(own)
    assert_same(fork, [array[:320] for array in other.before])
    call(own, "Pin", kv.PinRequest(session=name, unpin=True))
    call(own, "CloseSession", kv.CloseSessionRequest(session=name))
    with refused(grpc.StatusCode.NOT_FOUND, f"no session {name}"):
        own.fetch()
    assert other.info().pinned
    for closed in (other, fork):
        call(closed, "CloseSession", kv.CloseSessionRequest(session=closed.name))
        with refused(grpc.StatusCode.NOT_FOUND, f"no session {closed.name} of tenant other"):
            call(closed, "CloseSession", kv.CloseSessionRequest(session=closed.name))


def test_lists_go_on_between_tenants(daemon, stub, name):
    cache = Cache(stub, name, layers=1, shared=True)
    tenants = ["a", "b", "c", "default", "e"]
    for tenant in reversed(tenants):
        for i in range(2):
            Tenant(stub, tenant).OpenSession(
                kv.OpenSessionRequest(session=f"{name}/{i}", model=cache.model.name), timeout=TIMEOUT)
    everything = [(f"{name}/{i}", tenant) for i in range(2) for tenant in tenants]
    assert listed(stub, prefix=f"{name}/") == everything
    for tenant in tenants:
        mine = [one for one in everything if one[1] == tenant]
        assert listed(stub, prefix=f"{name}/", tenant=tenant) == mine
        assert listed(Tenant(stub, tenant), prefix=f"{name}/") == mine
        assert listed(Tenant(stub, tenant), prefix=f"{name}/", tenant=tenant) == mine
    # A name alone is behind all tenants' sessions of it.
    for page_token, left in ((f"{name}/0", 5), (f"{name}/0,c", 7), (f"{name}/1,e", 0)):
        request = kv.ListSessionsRequest(prefix=f"{name}/", page_token=page_token)
        assert len(stub.ListSessions(request, timeout=TIMEOUT).sessions) == left
    for page_token in (",a", "x,", "x,y,z", "x y", "x,no name", "x" * 129, "x," + "y" * 129):
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "page_token"):
            stub.ListSessions(kv.ListSessionsRequest(page_token=page_token), timeout=TIMEOUT)


def test_watchers_are_told_of_their_own(daemon, name):
    own, other = open_pair(daemon, name)
    for stub, tenants in ((other.stub, {"other"}), (Tenant(daemon.stub(), "default"), {"default"}),
                          (own.stub, {"default", "other"})):
        for ids in (False, True):
            told = set()
            for message in stub.Watch(kv.WatchRequest(model=own.model.name, token_ids=ids), timeout=TIMEOUT):
                told |= {event.tenant for event in message.events}
                if message.complete:
                    break
            assert told == tenants
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "tenant is default, the call's qkv-tenant is other"):
        next(other.stub.Watch(kv.WatchRequest(tenant="default"), timeout=TIMEOUT))


# ---- Appends that open sessions ----


def test_streams_open_sessions_of_their_tenant(daemon, stub, name):
    cache = Cache(stub, name, layers=1, shared=True)
    session = name + "-staged"

    def append(to, tokens, tenant="", complete=True):
        item = cache.item(0, *cache.rows(tokens))
        item.session = session
        opening = kv.OpenSessionRequest(session=session, model=cache.model.name, tenant=tenant)
        request = kv.AppendRequest(open=[opening], items=[item], complete=complete)
        return to.Append(iter([request]), timeout=TIMEOUT)

    append(stub, 10)
    append(Tenant(stub, "b"), 20)
    append(stub, 30, tenant="c")  # the field alone says it
    append(Tenant(stub, "d"), 40, tenant="d")
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "open[0]: tenant is c, the call's qkv-tenant is d"):
        append(Tenant(stub, "d"), 1, tenant="c")
    with refused(grpc.StatusCode.ALREADY_EXISTS, f"the session {session} is open already"):
        append(Tenant(stub, "b"), 1)
    for tenant, tokens in (("", 10), ("b", 20), ("c", 30), ("d", 40)):
        info = Tenant(stub, tenant).GetSession(kv.GetSessionRequest(session=session), timeout=TIMEOUT)
        assert (list(info.lengths), info.tenant) == ([tokens], tenant or "default")


@pytest.mark.parametrize("durability", [kv.DURABILITY_ASYNC, kv.DURABILITY_SYNC])
def test_streams_open_durable_sessions(start, durability):
    with start() as daemon:
        cache = Cache(daemon.stub(), "plain", layers=1, durability=durability, shared=True)
        item = cache.item(0, *cache.rows(100))
        item.session = "staged"
        opening = kv.OpenSessionRequest(session="staged", model=cache.model.name, tenant="t", durability=durability)
        rows = cache.rows(7)
        request = kv.AppendRequest(open=[opening], items=[item, cache.item(0, *rows)], complete=True, seal=True)
        assert cache.stub.Append(iter([request]), timeout=TIMEOUT).sessions == 1
        staged = Tenant(daemon.stub(), "t").GetSession(kv.GetSessionRequest(session="staged"), timeout=TIMEOUT)
        assert list(staged.durable) == [100] or durability == kv.DURABILITY_ASYNC
        assert list(cache.info().lengths) == [7]


# ---- On the SSD ----


def reopen(daemon, cache):
    made = copy.copy(cache)
    made.stub = Tenant(daemon.stub(), "" if cache.tenant == "default" else cache.tenant)
    return made


def test_sunk_sessions_of_one_name(start):
    with start() as daemon:
        pair = open_pair(daemon, "same", durability=kv.DURABILITY_ASYNC)
        for cache in pair:
            call(cache, "CloseSession", kv.CloseSessionRequest(session="same", keep=True))
            assert has(cache, "same").presence[0] == SSD
            cache.before = None
        pair[0].before = rows_of(pair[0])
        assert has(pair[1], "same").presence[0] == SSD  # the other one's pages stay where they are
        pair[1].before = rows_of(pair[1])
        call(pair[0], "CloseSession", kv.CloseSessionRequest(session="same"))
        assert has(pair[0], "same").presence[0] == NONE
        call(pair[1], "CloseSession", kv.CloseSessionRequest(session="same", keep=True))
        assert_same(pair[1])


@pytest.mark.parametrize("sunk", [False, True])
def test_both_are_found_after_a_crash(start, sunk):
    """Twice: what a restart finds is found by the next one, and a name that one tenant closes stays the other's."""
    with start() as daemon:
        pair = open_pair(daemon, "same", durability=kv.DURABILITY_SYNC)
        gone = open_pair(daemon, "gone", durability=kv.DURABILITY_SYNC)
        for cache in pair if sunk else ():
            call(cache, "CloseSession", kv.CloseSessionRequest(session="same", keep=True))
            cache.before = rows_of(cache)
        call(gone[0], "CloseSession", kv.CloseSessionRequest(session="gone"))
        call(pair[1], "Pin", kv.PinRequest(session="same"))
        daemon.kill()
    for _ in range(2):
        with start() as daemon:
            assert listed(daemon.stub()) == [("gone", "other"), ("same", "default"), ("same", "other")]
            for cache in (reopen(daemon, one) for one in (*pair, gone[1])):
                assert_same(cache)
                info = cache.info()
                assert (info.tenant, list(info.lengths)) == (cache.tenant, [len(cache.ids)] * LAYERS)
                assert info.pinned == (cache.tenant == "other" and cache.name == "same")
                match = call(cache, "Match", kv.MatchRequest(model="model-" + cache.name, token_ids=range(1000)))
                assert match.session == cache.name
            assert has(reopen(daemon, gone[0]), "gone").presence[0] == NONE
            daemon.kill()
    # The name that is free again is the tenant's own, and what it had before does not come back.
    with start() as daemon:
        again = Cache(daemon.stub(), "gone", layers=LAYERS, durability=kv.DURABILITY_SYNC)
        again.append(0, *again.rows(3))
        call(reopen(daemon, pair[1]), "CloseSession", kv.CloseSessionRequest(session="same"))
        daemon.kill()
    with start() as daemon:
        assert listed(daemon.stub()) == [("gone", "default"), ("gone", "other"), ("same", "default")]
        assert list(reopen(daemon, gone[0]).info().lengths) == [3, 0]
        assert_same(reopen(daemon, gone[1]))
        assert_same(reopen(daemon, pair[0]))


# ---- Who a call is from ----


def test_a_tenant_is_one_name(daemon, stub, name):
    cache = Cache(stub, name, layers=1, shared=True)
    request = kv.GetSessionRequest(session=name)
    for said, text in (([""], "the metadata qkv-tenant is empty"), (["no name"], "qkv-tenant has byte 0x20 at 2"),
                       (["x" * 129], "qkv-tenant is longer than 128 characters"),
                       (["x" * 8000], "qkv-tenant is longer than 128 characters"),
                       (["default", "default"], "qkv-tenant is given twice")):
        metadata = [("qkv-tenant", value) for value in said]
        with refused(grpc.StatusCode.INVALID_ARGUMENT, text):
            stub.GetSession(request, timeout=TIMEOUT, metadata=metadata)
    longest = Tenant(stub, "x" * 128)
    longest.OpenSession(kv.OpenSessionRequest(session=name, model=cache.model.name), timeout=TIMEOUT)
    assert longest.GetSession(request, timeout=TIMEOUT).tenant == "x" * 128
    with refused(grpc.StatusCode.NOT_FOUND, f"no session {name} of tenant {'x' * 127}"):
        Tenant(stub, "x" * 127).GetSession(request, timeout=TIMEOUT)


def test_objects_are_a_tenants(daemon, name):
    plain = objects_pb2_grpc.ObjectsStub(daemon.channel())
    mine = Tenant(plain, "t")
    for stub, data in ((plain, b"default's"), (mine, b"t's")):
        info = objects_pb2.ObjectInfo(object=name, bytes=len(data))
        put = objects_pb2.PutObjectsRequest(pieces=[objects_pb2.PutPiece(begin=info, data=data)])
        assert stub.PutObjects(iter([put]), timeout=TIMEOUT).objects == 1
    for stub, data, tenant in ((plain, b"default's", "default"), (mine, b"t's", "t")):
        answers = stub.GetObjects(objects_pb2.GetObjectsRequest(objects=[name]), timeout=TIMEOUT)
        assert b"".join(piece.data for answer in answers for piece in answer.pieces) == data
        found = stub.ListObjects(objects_pb2.ListObjectsRequest(prefix=name), timeout=TIMEOUT).objects
        assert [(info.object, info.tenant) for info in found] == [(name, tenant)]
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "tenant is u, the call's qkv-tenant is t"):
        mine.HasObjects(objects_pb2.HasObjectsRequest(tenant="u", objects=[name]), timeout=TIMEOUT)
    assert list(mine.DeleteObjects(objects_pb2.DeleteObjectsRequest(objects=[name]), timeout=TIMEOUT).deleted) == [True]
    assert list(plain.HasObjects(objects_pb2.HasObjectsRequest(objects=[name]), timeout=TIMEOUT).bytes) == [9]


def test_fields_and_metadata_agree(stub, name):
    cache = Cache(stub, name, layers=1, shared=True)
    mine = Tenant(stub, "t")
    requests = {"OpenSession": kv.OpenSessionRequest(session=name, model=cache.model.name, tenant="u"),
                "Match": kv.MatchRequest(model=cache.model.name, token_ids=[1], tenant="u"),
                "ListSessions": kv.ListSessionsRequest(tenant="u")}
    for method, request in requests.items():
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "tenant is u, the call's qkv-tenant is t"):
            getattr(mine, method)(request, timeout=TIMEOUT)
        for tenant in ("", "t"):
            request.tenant = tenant
            if method == "OpenSession":
                request.session = name + tenant
            getattr(mine, method)(request, timeout=TIMEOUT)


def test_failed_calls_are_logged_with_tenant_and_peer():
    with Daemon("--log-level", "debug") as daemon:
        for target in (daemon.tcp, daemon.target):
            with refused(grpc.StatusCode.NOT_FOUND, "no session s of tenant t"):
                Tenant(daemon.stub(target), "t").GetSession(kv.GetSessionRequest(session="s"), timeout=TIMEOUT)

        def failed():
            return [line for line in daemon.log_lines() if line["message"] == "call failed"]

        wait_for(lambda: len(failed()) == 2, "the lines")
        for line in failed():
            assert (line["call"], line["tenant"], line["status"]) == ("/qkv.v1.KvCache/GetSession", "t", "NOT_FOUND")
            assert line["reason"] == "no session s of tenant t"
        tcp, unix = (line["peer"] for line in failed())
        assert tcp.startswith("127.0.0.1:") and unix == f"unix, process {os.getpid()} of user {os.getuid()}"


# ---- Tools ----


def qkvctl(daemon, *arguments, **environment):
    result = subprocess.run([binary("qkvctl"), *arguments, "--target", daemon.target, "--json"], capture_output=True, text=True,
                            env=clean_environment(**environment), timeout=PATIENCE, stdin=subprocess.DEVNULL)
    assert result.returncode in (0, 1), result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()] if result.returncode == 0 else result.stderr.strip()


def test_lines_that_name_a_session_name_its_tenant(daemon, name):
    """Where it is not the default one."""
    for tenant in TENANTS:
        cache = Cache(Tenant(daemon.stub(), tenant), name, layers=1)
        cache.append(0, *cache.rows(1))
        call(cache, "Touch", kv.TouchRequest(session=name, ttl_ms=1))

    def lines():
        lines = [json.loads(line) for line in daemon.log_text().splitlines() if "session expired" in line]
        return [line for line in lines if line["session"] == name]
    wait_for(lambda: len(lines()) == 2, "the sessions do not expire")
    assert sorted(line.get("tenant", "") for line in lines()) == list(TENANTS)


def pages_at(cache, position):
    """Of another session of the cache's model."""
    source = copy.copy(cache)
    source.name = "coded"
    source.stub.OpenSession(kv.OpenSessionRequest(session=source.name, model=cache.model.name, first_position=position,
                                                  policy=model_pb2.CodecPolicy(recent_window=0)), timeout=TIMEOUT)
    source.append(position, *source.rows(64), dtype=FP16)
    pieces = source.stub.Fetch(kv.FetchRequest(session=source.name, layers=[0], coded=True), timeout=TIMEOUT)
    return [page for piece in pieces for page in piece.pages]


@pytest.mark.parametrize("coded", (False, True))
def test_appends_to_one_layer_leave_threads(coded):
    """A long append codes its pages, more appends to its layer wait for it than there are threads that compute: another tenant's
    rows are read before it ends."""
    with Daemon("--threads", "2", "--codec", "ecsq", "--calibrate-tokens", "0") as daemon:
        other = Cache(Tenant(daemon.stub(), "b"), "read", layers=1)
        other.append(0, *other.rows(256))
        cache = Cache(Tenant(daemon.stub(), "a"), "appended", layers=1, kv_heads=1, q_heads=1, key_dim=64, value_dim=64,
                      dtype=FP16, recent_window=0)
        append = daemon.stub().Append
        pages = pages_at(cache, 1 << 20) if coded else []

        def begin(item):
            request = kv.AppendRequest(items=[item])
            return append.future(iter([request]), timeout=TIMEOUT, metadata=(("qkv-tenant", "a"),))

        def begin_small():
            if coded:
                return begin(cache.item(1 << 20, pages=pages))
            return begin(cache.item(1 << 20, *cache.rows(1), dtype=FP16))

        long = begin(cache.item(0, *cache.rows(192000), dtype=FP16))
        waiting = [begin_small()]
        time.sleep(0.05)
        while waiting[0].done() and not long.done():  # it was refused: the long one has not begun
            waiting[0] = begin_small()
            time.sleep(0.05)
        waiting += [begin_small() for _ in range(8)]
        wait_for(lambda: daemon.metric("qkvd_calls_running") >= 1 + len(waiting) or long.done(), "the appends are not there")
        queued = [daemon.metric("qkvd_queue_jobs") for _ in range(10)]
        assert min(queued) <= 1, "all but one have a thread that may wait, else two"
        assert other.fetch()[0].shape[0] == 256
        for call in waiting:
            assert call.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert long.code() == grpc.StatusCode.OK


def test_one_tenant_leaves_places_of_the_queue():
    """Attends of one tenant fill three quarters of limit-queue, and more are refused by name. Another tenant's attend finds a
    place, and is served when the running one has had its turn."""
    with Daemon("--threads", "1", "--limit-queue", "8", "--codec", "exact") as daemon:
        other = Cache(Tenant(daemon.stub(), "b"), "read", layers=1)
        other.append(0, *other.rows(4096))
        cache = Cache(Tenant(daemon.stub(), "a"), "flooded", layers=1, q_heads=2, key_dim=128)
        for position in range(0, 16384, 4096):
            cache.append(position, *cache.rows(4096))
        request = kv.AttendRequest(items=[cache.item(16384, q=cache.queries(4000))])
        flood = []
        for _ in range(12):
            flood.append(daemon.stub().Attend.future(request, timeout=TIMEOUT, metadata=(("qkv-tenant", "a"),)))
        wait_for(lambda: any(call.done() for call in flood), "no attend is refused")
        out, _ = other.attend(4096, other.queries(400))
        assert out.shape[0] == 400
        ended = [call for call in flood if call.done()]
        assert 3 <= len(ended) < 12
        for call in ended:
            assert call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert call.details() == ("limit-queue is 8 jobs and 3 times as many of this tenant wait as there are places left: "
                                      "these are for others")
        assert daemon.metric("qkvd_refused_queue_total") == len(ended)
        for call in flood:
            call.cancel()


def test_opening_with_a_prefix_leaves_threads():
    """It is forked from a session to which a long append is under way, for which it waits: not on the only thread that computes."""
    with Daemon("--threads", "1", "--codec", "ecsq", "--calibrate-tokens", "0") as daemon:
        other = Cache(Tenant(daemon.stub(), "b"), "read", layers=1)
        other.append(0, *other.rows(256))
        stub, ids, tenant = Tenant(daemon.stub(), "a"), list(range(64)), (("qkv-tenant", "a"),)
        until = time.monotonic() + PATIENCE
        waited = False
        while not waited:  # else the append had not begun, or had ended
            assert time.monotonic() < until, "others wait for it, too"
            cache = Cache(stub, "appended", layers=1, kv_heads=1, q_heads=1, key_dim=64, value_dim=64, dtype=FP16)
            cache.append(0, *cache.rows(64), dtype=FP16, token_ids=ids)
            request = kv.AppendRequest(items=[cache.item(64, *cache.rows(192000), dtype=FP16)])
            long = daemon.stub().Append.future(iter([request]), timeout=TIMEOUT, metadata=tenant)
            while not (waited or long.done()):
                request = kv.OpenSessionRequest(session="forked", model=cache.model.name, prefix_token_ids=ids)
                opened = daemon.stub().OpenSession.future(request, timeout=TIMEOUT, metadata=tenant)
                time.sleep(0.02)
                assert other.fetch()[0].shape[0] == 256
                waited = not opened.done() and not long.done()
                assert opened.result().matched_tokens == 64
                stub.CloseSession(kv.CloseSessionRequest(session="forked"), timeout=TIMEOUT)
            assert long.code() == grpc.StatusCode.OK
            stub.CloseSession(kv.CloseSessionRequest(session="appended"), timeout=TIMEOUT)


def test_qkvctl(daemon, name, tmp_path):
    own, other = open_pair(daemon, name)
    both = ("--prefix", name)
    assert [one["tenant"] for one in qkvctl(daemon, "sessions", *both)] == ["default", "other"]
    assert [one["tenant"] for one in qkvctl(daemon, "sessions", *both, "--tenant", "other")] == ["other"]
    assert [one["tenant"] for one in qkvctl(daemon, "sessions", *both, QKVD_TENANT="other")] == ["other"]
    for more, tokens in (((), 300), (("--tenant", "default"), 300), (("--tenant", "other"), 500)):
        assert qkvctl(daemon, "session", name, *more)[0]["lengths"] == [tokens] * LAYERS
        assert qkvctl(daemon, "has", name, *more)[0]["tokens"] == tokens
    assert qkvctl(daemon, "session", name, "--tenant", "third") == f"qkvctl: no session {name} of tenant third"
    assert "tenant has byte 0x20" in qkvctl(daemon, "session", name, "--tenant", "no name")
    for tool, command in (("qkv-worker", "generate"), ("qkv-bench", "rpc"), ("qkv-bench", "encode")):
        shown = subprocess.run([binary(tool), command, "--help"], env=clean_environment(QKVD_TENANT="other"),
                               capture_output=True, text=True, timeout=PATIENCE)
        assert (shown.returncode, shown.stderr) == (0, "") and ("--tenant" in shown.stdout) == (command != "encode")
    # A file knows its tenant; --tenant goes before it.
    path = str(tmp_path / "session.qkvs")
    qkvctl(daemon, "fetch", name, "--tenant", "other", "--coded", "--output", path)
    with Daemon() as target:
        qkvctl(target, "load", path)
        qkvctl(target, "load", path, "--tenant", "third")
        qkvctl(daemon, "copy", name, "--to", target.target)
        assert listed(target.stub()) == [(name, "default"), (name, "other"), (name, "third")]
        for tenant, source in (("", own), ("other", other), ("third", other)):
            moved = copy.copy(source)
            moved.stub = Tenant(target.stub(), tenant)
            assert_same(moved)
    assert qkvctl(daemon, "truncate", name, "7", "--tenant", "other")
    assert (list(own.info().lengths), list(other.info().lengths)) == ([300] * LAYERS, [7] * LAYERS)
    assert qkvctl(daemon, "rm", name, "--tenant", "other")
    assert_same(own)
