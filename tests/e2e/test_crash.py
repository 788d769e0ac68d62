"""kill -9 under load, again and again: what was acknowledged as durable is there, and nothing is wrong.

QKV_CRASH_ROUNDS and QKV_CRASH_SEED set how often and with what. By hand:
QKV_CRASH_ROUNDS=1000 ctest --preset release --timeout 8000 -R e2e/crash.
"""

import os
import random
import threading
import time

import grpc
import numpy as np

from daemon import SANITIZED, Daemon
from kv import Cache
from qkv.v1 import kv_cache_pb2 as kv

ROUNDS = int(os.environ.get("QKV_CRASH_ROUNDS", 20 if SANITIZED else 200))
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
            if position < state.sealed():
                state.base = position
            state.length, state.truncating = position, None
            state.generation += 1
            return
        count = self.random.randrange(1, CHUNK)
        end = state.length + count
        state.pending = (state.length, end, state.generation)
        for layer in range(LAYERS):
            self.cache.append(state.length, *row_block(self.index, state.generation, layer, state.length, end),
                              layer=layer)
            if self.synced:  # every page that is full is acknowledged as durable
                state.durable[layer] = max(state.durable[layer], state.sealed(end))
        state.segments.append(state.pending)
        state.length, state.pending = end, None
        if self.random.random() < 0.3:
            state.durable = list(self.cache.info().durable)


class State:
    """What is known of a session: `segments` are (begin, end, generation) of the rows that were appended."""

    def __init__(self):
        self.segments, self.generation, self.length = [], 0, 0
        self.durable = [0] * LAYERS
        self.base = 0  # where the pages of 64 begin
        self.pending = self.truncating = None

    def sealed(self, length=None):
        length = self.length if length is None else length
        return self.base + (length - self.base) // 64 * 64

    def rows(self, session, layer, end):
        k, v = [], []
        for begin, until, generation in self.segments + ([self.pending] if self.pending else []):
            if begin < end:
                block = row_block(session, generation, layer, begin, min(until, end))
                k.append(block[0])
                v.append(block[1])
        return np.concatenate(k), np.concatenate(v)


def check(cache, index, state, round_number):
    """Compares what is found with what was appended, and goes on from there."""
    lengths = list(cache.info().lengths)
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
    common = min(lengths)
    cache.stub.Truncate(kv.TruncateRequest(session=cache.name, position=common))
    pending = [state.pending] if state.pending else []
    state.segments = [(begin, min(end, common), made) for begin, end, made in state.segments + pending if begin < common]
    state.length, state.pending, state.truncating = common, None, None
    state.durable = [common] * LAYERS
    state.base = common
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
