"""kill -9 under load, again and again: what was acknowledged as durable is there, and nothing is wrong.

QKV_CRASH_ROUNDS and QKV_CRASH_SEED set how often and with what. By hand:
QKV_CRASH_ROUNDS=1000 ctest --preset release --timeout 8000 -R e2e/crash.
"""

import copy
import os
import random
import threading
import time

import grpc
import numpy as np

from daemon import SANITIZER, Daemon
from kv import Cache
from qkv.v1 import kv_cache_pb2 as kv

ROUNDS = int(os.environ.get("QKV_CRASH_ROUNDS", {"": 200, "thread": 5}.get(SANITIZER, 20)))
SEED = int(os.environ.get("QKV_CRASH_SEED", random.SystemRandom().randrange(1 << 32)))
SESSIONS, SYNCED, LAYERS, TOKENS_MAX, CHUNK = 3, 2, 2, 2048, 96
WIDTH = 16


def row_block(session, generation, layer, begin, end):
    """Rows that are a function of their place, so that whatever is found can be checked. Values that 8 bits code well."""
    position = np.arange(begin, end)[:, None, None]
    head = np.arange(2)[None, :, None]
    column = np.arange(WIDTH)[None, None, :]
    phase = 0.37 * position + 1.9 * head + 0.61 * column + 5.3 * layer + 11.7 * session + 3.1 * generation
    return np.sin(phase).astype(np.float32), np.cos(1.3 * phase).astype(np.float32)


class Loader(threading.Thread):
    """Appends to one session, truncates it now and then, and notes what has been acknowledged."""

    def __init__(self, cache, index, state, rng):
        super().__init__(daemon=True)
        self.synced = index < SYNCED
        self.cache, self.index, self.state, self.random = cache, index, state, rng

    def run(self):
        try:
            while True:
                self.step()
        except grpc.RpcError:
            pass  # the daemon has been killed

    def step(self):
        state = self.state
        if state.length >= TOKENS_MAX or self.random.random() < 0.02:
            position = self.random.randrange(state.length + 1)
            state.truncating = position  # from here on either may be found
            self.cache.stub.Truncate(kv.TruncateRequest(session=self.cache.name, position=position))
            state.durable = [min(durable, position) for durable in state.durable]
            state.segments = [(begin, min(end, position), made) for begin, end, made in state.segments if begin < position]
            state.length, state.truncating = position, None
            state.generation += 1
            return
        count = self.random.randrange(1, CHUNK)
        end = state.length + count
        state.pending = (state.length, end, state.generation)
        for layer in range(LAYERS):
            self.cache.append(state.length, *row_block(self.index, state.generation, layer, state.length, end),
                              layer=layer)
            if self.synced:  # every row that is acknowledged is durable
                state.durable[layer] = end
        state.segments.append(state.pending)
        state.length, state.pending = end, None
        if self.random.random() < 0.3:
            state.durable = list(self.cache.info().durable)


class State:
    """What is known of a session: `segments` are (begin, end, generation) of the rows that were appended."""

    def __init__(self):
        self.segments, self.generation, self.length = [], 0, 0
        self.durable = [0] * LAYERS
        self.pending = self.truncating = None

    def rows(self, session, layer, end):
        k, v = [], []
        for begin, until, generation in self.segments + ([self.pending] if self.pending else []):
            if begin < end:
                block = row_block(session, generation, layer, begin, min(until, end))
                k.append(block[0])
                v.append(block[1])
        return np.concatenate(k), np.concatenate(v)


def same_at_the_end(expected, found):
    """How many of the last rows are the same to the bit."""
    differ = [np.any(want != got, axis=(1, 2)) for want, got in zip(expected, found)]
    places = np.flatnonzero(differ[0] | differ[1])
    return len(found[0]) - (places[-1] + 1 if len(places) else 0)


def check(cache, index, state, round_number):
    """Compares what is found with what was appended, and goes on from there."""
    info = cache.info()
    lengths, exact = list(info.lengths), 0
    for layer in range(LAYERS):
        least = state.durable[layer] if state.truncating is None else min(state.durable[layer], state.truncating)
        assert lengths[layer] >= least, f"seed {SEED}, round {round_number}: {lengths} found, {state.durable} were durable"
        if lengths[layer] == 0:
            continue
        expected = state.rows(index, layer, lengths[layer])
        assert len(expected[0]) == lengths[layer], f"seed {SEED}, round {round_number}: more was found than was sent"
        found = cache.fetch(layers=(layer,))
        for want, got in zip(expected, found):
            error = np.abs(want - got).max()
            assert error < 0.1, f"seed {SEED}, round {round_number}: rows differ by {error}"
        exact += same_at_the_end(expected, found)
    assert exact >= info.tokens_exact, f"seed {SEED}, round {round_number}: exact rows differ"
    common = min(lengths)
    cache.stub.Truncate(kv.TruncateRequest(session=cache.name, position=common))
    pending = [state.pending] if state.pending else []
    state.segments = [(begin, min(end, common), made) for begin, end, made in state.segments + pending if begin < common]
    state.length, state.pending, state.truncating = common, None, None
    state.durable = [common] * LAYERS
    state.generation += 1


def test_kill_under_load(tmp_path):
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    states = [State() for _ in range(SESSIONS)]
    caches = []
    for round_number in range(ROUNDS):
        with Daemon("--data-dir", str(tmp_path / "data"), "--storage-io", rng.choice(["uring", "pread"]),
                    "--storage-segment", "1MiB", "--memory-budget", "16MiB", "--storage-compact-rate",
                    rng.choice(["0", "64MiB"])) as daemon:
            if caches:
                for index, cache in enumerate(caches):
                    cache.stub = daemon.stub()
                    check(cache, index, states[index], round_number)
            else:
                caches = [Cache(daemon.stub(), f"s{i}", layers=LAYERS, recent_window=0, bits_k=8, bits_v=8,
                                durability=kv.DURABILITY_SYNC if i < SYNCED else kv.DURABILITY_ASYNC)
                          for i in range(SESSIONS)]
            loaders = [Loader(cache, i, states[i], random.Random(rng.random())) for i, cache in enumerate(caches)]
            for loader in loaders:
                loader.start()
            time.sleep(rng.random() * 0.2)  # the moment of the kill
            daemon.kill()
            for loader in loaders:
                loader.join()


def sync_cache(daemon, name="s", **fields):
    return Cache(daemon.stub(), name, layers=LAYERS, recent_window=64, bits_k=8, bits_v=8,
                 durability=kv.DURABILITY_SYNC, **fields)


def append_rows(cache, begin, end, generation=0):
    for layer in range(LAYERS):
        cache.append(begin, *row_block(0, generation, layer, begin, end), layer=layer)


def assert_rows(cache, segments, exact_from):
    """The session's rows are those of the (begin, end, generation), those from `exact_from` on to the bit."""
    end = segments[-1][1]
    assert list(cache.info().lengths) == [end] * LAYERS
    for layer in range(LAYERS):
        blocks = [row_block(0, generation, layer, begin, until) for begin, until, generation in segments]
        expected = [np.concatenate(part) for part in zip(*blocks)]
        found = cache.fetch(layers=(layer,))
        assert max(np.abs(want - got).max() for want, got in zip(expected, found)) < 0.1
        assert same_at_the_end(expected, found) >= end - exact_from


def test_sync_session_keeps_every_row(tmp_path):
    """Exact rows of what was acknowledged are there after kill -9: appended at once, one by one, and cut."""
    arguments = ("--data-dir", str(tmp_path / "data"))
    with Daemon(*arguments) as daemon:
        cache = sync_cache(daemon)
        append_rows(cache, 0, 575)
        assert list(cache.info().durable) == [575] * LAYERS
        daemon.kill()
    with Daemon(*arguments) as daemon:
        cache.stub = daemon.stub()
        assert_rows(cache, [(0, 575, 0)], 512)
        for position in range(575, 675):  # a page is sealed on the way
            append_rows(cache, position, position + 1)
        daemon.kill()
    with Daemon(*arguments) as daemon:
        cache.stub = daemon.stub()
        assert_rows(cache, [(0, 675, 0)], 576)
        cache.stub.Truncate(kv.TruncateRequest(session=cache.name, position=650))
        append_rows(cache, 650, 653, generation=1)
        daemon.kill()
    with Daemon(*arguments) as daemon:
        cache.stub = daemon.stub()
        assert_rows(cache, [(0, 650, 0), (650, 653, 1)], 576)
        cache.stub.Truncate(kv.TruncateRequest(session=cache.name, position=600))
        daemon.kill()
    with Daemon(*arguments) as daemon:
        cache.stub = daemon.stub()
        assert_rows(cache, [(0, 600, 0)], 576)
        assert daemon.metric("qkvd_storage_lost_pages_total") == 0


def test_forks_of_sync_sessions_keep_every_row(tmp_path):
    """A fork has all rows below its position whatever its parent does then, and its own exact ones behind them. What the
    parent makes pages of, before its truncation to 140, comes back as codes."""
    arguments = ("--data-dir", str(tmp_path / "data"))
    with Daemon(*arguments) as daemon:
        parent = sync_cache(daemon, "parent")
        append_rows(parent, 0, 150)
        append_rows(parent, 150, 160)
        for name in "own", "idle":
            parent.stub.Fork(kv.ForkRequest(session="parent", fork=name, position=155))
        own, idle = copy.copy(parent), copy.copy(parent)
        own.name, idle.name = "own", "idle"
        append_rows(own, 155, 158, generation=2)
        parent.stub.Truncate(kv.TruncateRequest(session="parent", position=140))
        append_rows(parent, 140, 400, generation=1)
        daemon.kill()
    with Daemon(*arguments) as daemon:
        parent.stub = own.stub = idle.stub = daemon.stub()
        assert_rows(own, [(0, 155, 0), (155, 158, 2)], 140)
        assert_rows(idle, [(0, 155, 0)], 140)
        assert_rows(parent, [(0, 140, 0), (140, 400, 1)], 320)
        parent.stub.CloseSession(kv.CloseSessionRequest(session="parent"))
        append_rows(idle, 155, 156, generation=3)
        daemon.kill()
    with Daemon(*arguments) as daemon:
        own.stub = idle.stub = daemon.stub()
        assert_rows(own, [(0, 155, 0), (155, 158, 2)], 140)
        assert_rows(idle, [(0, 155, 0), (155, 156, 3)], 140)
