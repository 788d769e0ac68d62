"""What one tenant can learn of another: error texts and the time that answers take."""

import random
import time

import grpc
import pytest

from daemon import Daemon
from kv import TIMEOUT, Cache, refused
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2
from test_cli import json_lines
from test_identity import bearer, new_token

SAMPLES, BOUND, ATTEMPTS = 800, 0.07, 3  # under equal distributions the bound is 4.9 standard deviations, three times over


class Client:
    """A stub whose calls show a token."""

    def __init__(self, daemon, token):
        self.stub, self.metadata = daemon.stub(), bearer(token)

    def __getattr__(self, method):
        return lambda request, **fields: getattr(self.stub, method)(request, metadata=self.metadata, **fields)


@pytest.fixture(scope="module")
def who(tmp_path_factory):
    """(auth file, tokens)"""
    path = tmp_path_factory.mktemp("isolation") / "auth"
    made = {name: new_token(tenant, "read,write") for name, tenant in (("a", "team-a"), ("b", "team-b"), ("all", "*"))}
    path.write_text("".join(f"{line}\n" for _, line in made.values()))
    return path, {name: token for name, (token, _) in made.items()}


@pytest.fixture
def guarded(who):
    with Daemon("--auth-file", who[0]) as daemon:
        yield daemon


def calibrations(folder, model, layers=1):
    """Two of one model, of other rows each."""
    made = []
    with Daemon() as daemon:
        for seed in (1, 2):
            cache = Cache(daemon.stub(), model, layers=layers, seed=seed)
            for layer in range(layers):
                cache.append(0, *cache.rows(256), layer=layer)
            dump, file = folder / f"{seed}.safetensors", folder / f"{seed}.qkvc"
            json_lines("qkvctl", "fetch", cache.name, "--output", str(dump), "--target", daemon.target)
            json_lines("qkvctl", "calibrate", cache.model.name, "--from", str(dump), "--output", str(file), "--target",
                       daemon.target)
            cache.stub.CloseSession(kv.CloseSessionRequest(session=cache.name), timeout=TIMEOUT)
            made.append(file.read_bytes())
    assert made[0] != made[1]
    return made


# ---- What answers tell ----

def excess(first, second):
    """By how much a value of `first` is larger than one of `second` more often than in half of the pairs: -0.5 to 0.5.

    Mann and Whitney's statistic, which a few slow calls do not move."""
    ranked = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    ranks = sum(rank for rank, (_, which) in enumerate(ranked, 1) if which == 0)
    count = len(first)
    return (ranks - count * (count + 1) / 2) / (count * len(second)) - 0.5


def compare(one, other):
    """The excess of the time that the first call takes, samples of both in random order."""
    order = [0, 1] * SAMPLES
    random.Random(1).shuffle(order)
    times = ([], [])
    for which in order:
        begin = time.perf_counter_ns()
        (one, other)[which]()
        times[which].append(time.perf_counter_ns() - begin)
    return excess(*times)


def assert_alike(one, other):
    """What noise brings about does not come three times."""
    seen = []
    for _ in range(ATTEMPTS):
        seen.append(compare(one, other))
        if abs(seen[-1]) < BOUND:
            return
    pytest.fail(f"one of two calls that must not differ takes longer: {seen}")


def test_statistic():
    pick = random.Random(2)
    noise = [[pick.gauss(100, 10) + (1000 if pick.random() < 0.05 else 0) for _ in range(SAMPLES)] for _ in range(2)]
    assert abs(excess(*noise)) < BOUND
    assert excess([value + 5 for value in noise[0]], noise[1]) > BOUND  # half of the noise


def error_of(call, request):
    try:
        call(request, timeout=TIMEOUT)
    except grpc.RpcError as error:
        return error.code(), error.details()
    return None


@pytest.fixture
def pair(guarded, who):
    """Team b has "there" with 256 tokens, whose ids come with it; team a asks."""
    a, b = (Client(guarded, who[1][name]) for name in "ab")
    cache, ids = Cache(b, "there", layers=1, q_heads=2), list(range(256))
    a.RegisterModel(model_pb2.RegisterModelRequest(model=cache.model), timeout=TIMEOUT)
    cache.append(0, *cache.rows(256), token_ids=ids)
    assert b.Match(kv.MatchRequest(model=cache.model.name, token_ids=ids), timeout=TIMEOUT).tokens == 256
    return a, cache.model.name, ids


def test_texts_are_the_same(pair):
    a, model, ids = pair
    calls = {"GetSession": lambda name: kv.GetSessionRequest(session=name),
             "CloseSession": lambda name: kv.CloseSessionRequest(session=name),
             "Truncate": lambda name: kv.TruncateRequest(session=name, position=1),
             "Demote": lambda name: kv.DemoteRequest(session=name, bits=1),
             "Fork": lambda name: kv.ForkRequest(session=name, fork="child")}
    for method, request in calls.items():
        there, nowhere = (error_of(getattr(a, method), request(name)) for name in ("there", "where"))
        assert there[0] == nowhere[0] == grpc.StatusCode.NOT_FOUND, (method, there, nowhere)
        assert there[1].replace("there", "where") == nowhere[1]
    answers = [a.Match(kv.MatchRequest(model=model, token_ids=each), timeout=TIMEOUT) for each in (ids, ids[::-1])]
    assert answers[0] == answers[1] and answers[0].tokens == 0


def test_get_session_takes_as_long(pair):
    a, there, nowhere = pair[0], *(kv.GetSessionRequest(session=name) for name in ("there", "where"))
    assert_alike(lambda: error_of(a.GetSession, there), lambda: error_of(a.GetSession, nowhere))


def test_match_takes_as_long(pair):
    a, model, ids = pair
    there, nowhere = (kv.MatchRequest(model=model, token_ids=each) for each in (ids, ids[::-1]))
    assert_alike(lambda: a.Match(there, timeout=TIMEOUT), lambda: a.Match(nowhere, timeout=TIMEOUT))
