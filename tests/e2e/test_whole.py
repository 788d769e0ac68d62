"""Appends that open sessions: each is seen as a whole, or not at all."""

import queue
import threading
import time

import grpc
import numpy as np
import pytest

from daemon import Daemon, wait_for
from kv import TIMEOUT, Cache, refused
from qkv.v1 import kv_cache_pb2 as kv

NONE, MEMORY = kv.HasSessionsResponse.PRESENCE_NONE, kv.HasSessionsResponse.PRESENCE_MEMORY


class Stream:
    """An Append stream that is sent to message by message."""

    def __init__(self, stub):
        self.messages = queue.Queue()
        self.call = stub.Append.future(iter(self.messages.get, None), timeout=TIMEOUT)

    def send(self, **fields):
        self.messages.put(kv.AppendRequest(**fields))

    def end(self):
        self.messages.put(None)
        return self.call.result()

    def cancel(self):
        self.call.cancel()
        self.messages.put(None)


def opening(cache, name, **fields):
    return kv.OpenSessionRequest(session=name, model=cache.model.name, **fields)


def rows_of(cache, name, tokens, layer=0, position=0, rows=None, **fields):
    item = cache.item(position, *(rows or cache.rows(tokens)), layer=layer, **fields)
    item.session = name
    return item


def is_open(stub, names):
    return [p != 0 for p in stub.HasSessions(kv.HasSessionsRequest(sessions=names), timeout=TIMEOUT).presence]


def listed(stub):
    return [info.session for info in stub.ListSessions(kv.ListSessionsRequest(), timeout=TIMEOUT).sessions]


def test_nobody_sees_it_before_it_is_complete(daemon, stub, make_cache):
    cache = make_cache(layers=2)
    name = cache.name + "-staged"
    ids = list(range(1000, 1128))
    stream = Stream(stub)
    stream.send(open=[opening(cache, name)], items=[rows_of(cache, name, 128, token_ids=ids)])
    stream.send(items=[rows_of(cache, name, 128, 1)])
    wait_for(lambda: daemon.metric("qkvd_sessions") > 1, "the sessions")
    time.sleep(0.2)
    assert is_open(stub, [name]) == [False] and name not in listed(stub)
    with refused(grpc.StatusCode.NOT_FOUND, f"no session {name}"):
        stub.GetSession(kv.GetSessionRequest(session=name), timeout=TIMEOUT)
    with refused(grpc.StatusCode.NOT_FOUND, f"no session {name}"):
        stub.CloseSession(kv.CloseSessionRequest(session=name), timeout=TIMEOUT)
    match = kv.MatchRequest(model=cache.model.name, token_ids=ids)
    assert stub.Match(match, timeout=TIMEOUT).session == ""
    stream.send(complete=True)
    wait_for(lambda: is_open(stub, [name]) == [True], "the sessions")
    answer = stream.end()
    assert (answer.items, answer.tokens, answer.sessions) == (2, 256, 1)
    assert name in listed(stub)
    assert stub.Match(match, timeout=TIMEOUT).session == name
    info = stub.GetSession(kv.GetSessionRequest(session=name), timeout=TIMEOUT)
    assert (list(info.lengths), info.whole) == ([128, 128], 128)
    # From here on it is as any other.
    stub.Append(iter([kv.AppendRequest(items=[rows_of(cache, name, 5, position=128)])]), timeout=TIMEOUT)
    stub.Truncate(kv.TruncateRequest(session=name, position=100), timeout=TIMEOUT)
    assert stub.GetSession(kv.GetSessionRequest(session=name), timeout=TIMEOUT).whole == 100


def test_one_message_does_it_all(stub, make_cache):
    cache = make_cache(layers=1, recent_window=64)
    rows = cache.rows(100)
    for seal in (False, True):
        name = f"{cache.name}-{seal}"
        request = kv.AppendRequest(open=[opening(cache, name)], items=[rows_of(cache, name, 100, rows=rows)],
                                   complete=True, seal=seal)
        assert stub.Append(iter([request]), timeout=TIMEOUT).sessions == 1
        info = stub.GetSession(kv.GetSessionRequest(session=name), timeout=TIMEOUT)
        assert (info.tokens_exact, info.tokens_coded) == ((0, 100) if seal else (100, 0))


def test_several_in_one_stream(daemon, stub, make_cache):
    cache = make_cache(layers=1)
    before = daemon.metric("qkvd_sessions")
    names = [f"{cache.name}-{i}" for i in range(6)]
    stream = Stream(stub)
    stream.send(open=[opening(cache, name) for name in names[:2]], items=[rows_of(cache, name, 9) for name in names[:2]],
                complete=True)
    stream.send(open=[opening(cache, names[2])])
    stream.send(items=[rows_of(cache, names[2], 9), rows_of(cache, names[0], 3, position=9)], complete=True)
    stream.send(open=[opening(cache, names[3]), opening(cache, names[4])],
                items=[rows_of(cache, names[3], 9), rows_of(cache, names[4], 9)])
    # The name of the second of these is taken by another: the first is there, the second not.
    wait_for(lambda: daemon.metric("qkvd_sessions") == before + 5, "the sessions")
    assert is_open(stub, names) == [True] * 3 + [False] * 3
    stub.OpenSession(opening(cache, names[4]), timeout=TIMEOUT)
    stream.send(complete=True)
    with refused(grpc.StatusCode.ALREADY_EXISTS, f"message 4: the session {names[4]} is open already"):
        stream.end()
    assert is_open(stub, names) == [True] * 5 + [False]
    held = stub.HasSessions(kv.HasSessionsRequest(sessions=names, tokens=True), timeout=TIMEOUT).tokens
    assert list(held) == [12, 9, 9, 9, 0, 0]


@pytest.mark.parametrize("ending", ["cancel", "half", "bad item", "deadline"])
def test_nothing_is_left_of_a_stream_that_ends(daemon, stub, make_cache, ending):
    cache = make_cache(layers=2)
    name = cache.name + "-staged"
    before = daemon.metric("qkvd_sessions"), daemon.metric("qkvd_kv_bytes")
    dropped = daemon.metric("qkvd_sessions_incomplete_total")
    if ending == "deadline":
        messages = queue.Queue()
        messages.put(kv.AppendRequest(open=[opening(cache, name)], items=[rows_of(cache, name, 100)]))
        with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
            stub.Append(iter(messages.get, None), timeout=0.5)
        messages.put(None)
    else:
        stream = Stream(stub)
        stream.send(open=[opening(cache, name)], items=[rows_of(cache, name, 100)])
        wait_for(lambda: daemon.metric("qkvd_sessions") == before[0] + 1, "the sessions")
        if ending == "cancel":
            stream.cancel()
        elif ending == "half":
            with refused(grpc.StatusCode.FAILED_PRECONDITION,
                         f"the stream has ended without `complete`: session {name} is dropped"):
                stream.end()
        else:
            stream.send(items=[rows_of(cache, name, 9, position=200)], complete=True)
            with refused(grpc.StatusCode.FAILED_PRECONDITION, "message 1: items[0].position"):
                stream.end()
    wait_for(lambda: daemon.metric("qkvd_sessions") == before[0], "the sessions")
    wait_for(lambda: daemon.metric("qkvd_kv_bytes") <= before[1], "the sessions")
    assert not is_open(stub, [name])[0]
    assert daemon.metric("qkvd_sessions_incomplete_total") == dropped + 1
    # The name is free.
    stub.OpenSession(opening(cache, name), timeout=TIMEOUT)


def test_two_writers_of_one_name(stub, make_cache):
    cache = make_cache(layers=1)
    name = cache.name + "-staged"
    rows = cache.rows(100)
    results = []

    def put():
        request = kv.AppendRequest(open=[opening(cache, name)], items=[rows_of(cache, name, 100, rows=rows)],
                                   complete=True)
        try:
            stub.Append(iter([request]), timeout=TIMEOUT)
            results.append(grpc.StatusCode.OK)
        except grpc.RpcError as error:
            results.append(error.code())

    threads = [threading.Thread(target=put) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results, key=str) == [grpc.StatusCode.ALREADY_EXISTS] * 7 + [grpc.StatusCode.OK]


def test_bad_openings(stub, make_cache):
    cache = make_cache(layers=1)

    def append(**fields):
        stub.Append(iter([kv.AppendRequest(**fields)]), timeout=TIMEOUT)

    with refused(grpc.StatusCode.ALREADY_EXISTS, f"message 0: open[0]: the session {cache.name} is open already"):
        append(open=[opening(cache, cache.name)], complete=True)
    with refused(grpc.StatusCode.NOT_FOUND, "message 0: open[1]: no model nobody"):
        append(open=[opening(cache, "a"), kv.OpenSessionRequest(session="b", model="nobody")], complete=True)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "open[0]: prefix_token_ids has 2 entries"):
        append(open=[opening(cache, "a", prefix_token_ids=[1, 2])], complete=True)
    with refused(grpc.StatusCode.ALREADY_EXISTS, "open[1]: this stream has opened the session a already"):
        append(open=[opening(cache, "a"), opening(cache, "a")], complete=True)
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "open[256]: a stream opens 256 sessions at most"):
        append(open=[opening(cache, f"a{i}") for i in range(257)], complete=True)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "items is empty, at least 1"):
        append(seal=True)
    assert is_open(stub, ["a", "b", "a0"]) == [False] * 3
    append(complete=True)  # of nothing


def test_a_kill_leaves_all_or_nothing(tmp_path):
    """Random moments. What is found is whole, and everything is found that was SYNC or was found before."""
    random = np.random.default_rng(1)
    put, certain = {}, set()
    for round in range(4):
        with Daemon("--data-dir", str(tmp_path), "--memory-budget", "256MiB") as daemon:
            stub = daemon.stub()
            if round == 0:
                cache = Cache(stub, "base", layers=2, durability=kv.DURABILITY_ASYNC)
            cache.stub = stub
            found = set(listed(stub)) - {"base"}
            for cache.name in found:
                k = put[cache.name][0]
                assert list(cache.info().lengths) == [len(k), len(k)], cache.name
                got = cache.fetch((1,))[0]
                assert np.mean((got - k) ** 2) < 0.1 * np.mean(k ** 2)
            assert certain <= found <= set(put)
            certain |= found
            for i in range(30):
                name = f"r{round}-{i}"
                put[name] = cache.rows(int(random.integers(1, 300)))
                kind = kv.DURABILITY_SYNC if i % 3 == 0 else kv.DURABILITY_ASYNC
                request = kv.AppendRequest(open=[opening(cache, name, durability=kind)],
                                           items=[rows_of(cache, name, 0, layer, rows=put[name]) for layer in range(2)],
                                           complete=True, seal=i % 2 == 0)
                stub.Append(iter([request]), timeout=TIMEOUT)
                certain |= {name} if kind == kv.DURABILITY_SYNC else set()
            stage = Stream(stub)
            stage.send(open=[opening(cache, f"never-{round}", durability=kv.DURABILITY_ASYNC)],
                       items=[rows_of(cache, f"never-{round}", 300, layer) for layer in range(2)])
            time.sleep(float(random.uniform(0, 1.5)))
            daemon.kill()
            stage.messages.put(None)
