"""HasSessions: which of many sessions are open."""

import json
import subprocess
import time

import grpc
import pytest

from daemon import PATIENCE, Daemon, binary, clean_environment
from kv import TIMEOUT, Cache, refused
from qkv.v1 import kv_cache_pb2 as kv

NONE, MEMORY, SSD = (kv.HasSessionsResponse.PRESENCE_NONE, kv.HasSessionsResponse.PRESENCE_MEMORY,
                     kv.HasSessionsResponse.PRESENCE_SSD)


def has(stub, names, **fields):
    answer = stub.HasSessions(kv.HasSessionsRequest(sessions=names, **fields), timeout=TIMEOUT)
    return list(answer.presence), list(answer.tokens)


def test_open_sessions_are_found_in_order(stub, make_cache):
    cache, empty = make_cache(layers=2), make_cache(layers=2, first_position=7)
    cache.append(0, *cache.rows(100))
    names = ["nobody", cache.name, empty.name, cache.name]
    assert has(stub, names) == ([NONE, MEMORY, MEMORY, MEMORY], [])
    assert has(stub, names, tokens=True) == ([NONE, MEMORY, MEMORY, MEMORY], [0, 0, 0, 0])
    cache.append(0, *cache.rows(80), layer=1)
    empty.append(7, *empty.rows(5))
    empty.append(7, *empty.rows(3), layer=1)
    assert has(stub, names, tokens=True)[1] == [0, 80, 3, 80]
    stub.CloseSession(kv.CloseSessionRequest(session=cache.name), timeout=TIMEOUT)
    assert has(stub, names, tokens=True) == ([NONE, NONE, MEMORY, NONE], [0, 0, 3, 0])
    assert has(stub, []) == ([], [])


def test_limits(stub):
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "sessions has 16385 entries, at most 16384"):
        has(stub, ["a"] * 16385)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "sessions[1]: the name"):
        has(stub, ["a", "no name"])
    for names in (["a"] * 16384, ["a" * 128] * 16384):
        assert has(stub, names)[0] == [NONE] * 16384
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "request is ", "at most 2150400"):
        has(stub, ["a" * 1024] * 2100)


def test_a_touch_is_a_use(daemon, stub, make_cache):
    cache = make_cache()

    def used():
        return stub.GetSession(kv.GetSessionRequest(session=cache.name), timeout=TIMEOUT).last_used_unix_ms

    before = used()
    time.sleep(0.3)
    has(stub, [cache.name])
    assert used() < before + 200
    has(stub, [cache.name], touch=True)
    assert used() > before + 200


def test_the_ssd_is_told(tmp_path):
    with Daemon("--data-dir", str(tmp_path)) as daemon:
        stub = daemon.stub()
        cache = Cache(stub, "s", layers=1, durability=kv.DURABILITY_ASYNC)
        cache.append(0, *cache.rows(256))
        assert has(stub, ["s"], tokens=True) == ([MEMORY], [256])
        stub.CloseSession(kv.CloseSessionRequest(session="s", keep=True), timeout=TIMEOUT)
        assert has(stub, ["s"], tokens=True) == ([SSD], [256])


def test_a_thousand_names_are_answered_at_once(daemon, stub, make_cache):
    cache = make_cache(layers=2)
    names = [f"{cache.name}-{i}" for i in range(1000)]
    for name in names[::2]:
        stub.OpenSession(kv.OpenSessionRequest(session=name, model=cache.model.name), timeout=TIMEOUT)
    times = []
    for _ in range(20):
        begin = time.monotonic()
        assert has(stub, names)[0] == [MEMORY, NONE] * 500
        times.append(time.monotonic() - begin)
    assert sorted(times)[10] < 0.1  # the figure is docs/cache-use.md's


@pytest.mark.parametrize("touch", [[], ["--touch"]])
def test_qkvctl_has(daemon, stub, make_cache, touch):
    cache = make_cache(layers=1)
    cache.append(0, *cache.rows(9))

    def run(*arguments):
        return subprocess.run([binary("qkvctl"), "has", "--target", daemon.target, *arguments, *touch],
                              env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE)

    one = run(cache.name, "--json")
    assert (one.returncode, json.loads(one.stdout)) == (
        0, {"session": cache.name, "open": True, "in_memory": True, "tokens": 9})
    two = run(cache.name, "nobody")
    assert (two.returncode, two.stdout) == (
        1, f"{cache.name}: in memory, 9 tokens\nnobody: not open, 0 tokens\n")
    wrong = run("no name")
    assert wrong.returncode == 1 and "sessions[0]" in wrong.stderr
