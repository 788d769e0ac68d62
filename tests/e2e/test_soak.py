"""Sessions of several times the memory come, grow, leave memory, come back, are cut and go, while resident memory is
watched and rows are compared with what was sent.

Resident memory stays within the budget and a tenth. QKV_SOAK_SECONDS and QKV_SOAK_SEED set how long and with what; by
hand an hour, with more memory: QKV_SOAK_SECONDS=3600 ctest --preset release --timeout 8000 -V -R e2e/soak
"""

import os
import random
import threading
import time

import numpy as np
import pytest

from daemon import SANITIZED, Daemon, wait_for
from kv import Cache, attention
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import tensor_pb2

SECONDS = int(os.environ.get("QKV_SOAK_SECONDS", 15))
SEED = int(os.environ.get("QKV_SOAK_SEED", 1))
LARGE = SECONDS >= 120
BUDGET = (256 if LARGE else 96) << 20
WORKERS, SESSIONS = 3, 72 if LARGE else 9  # sessions of each worker
LAYERS, HEADS, WIDTH, CHUNK, TOKENS_MAX = 4, 4, 64, 256, 8192


def row_block(generation, layer, begin, end):
    """Rows that are a function of their place; values that 8 bits code well."""
    position = np.arange(begin, end, dtype=np.float32)[:, None, None]
    place = 1.9 * np.arange(HEADS, dtype=np.float32)[:, None] + 0.61 * np.arange(WIDTH, dtype=np.float32)[None, :]
    phase = 0.37 * position + place[None] + np.float32(5.3 * layer + 3.1 * (generation % 1000))
    return np.sin(phase), np.cos(1.3 * phase)


class Session:
    """One session, and what it should hold: `segments` are (begin, end, generation)."""

    generations = iter(range(1 << 60))

    def __init__(self, stub, name, durability):
        self.cache = Cache(stub, name, layers=LAYERS, kv_heads=HEADS, q_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH,
                           bits_k=8, bits_v=8, recent_window=64, durability=durability)
        self.stub, self.name, self.segments, self.length = stub, name, [], 0

    def expected(self, layer, begin, end):
        parts = [row_block(made, layer, max(first, begin), min(last, end))
                 for first, last, made in self.segments if first < end and last > begin]
        return [np.concatenate(part) for part in zip(*parts)]

    def append(self, rng):
        count = min(rng.randrange(1, CHUNK + 1), TOKENS_MAX - self.length)
        generation = next(self.generations)
        for layer in range(LAYERS):
            self.cache.append(self.length, *row_block(generation, layer, self.length, self.length + count), layer=layer)
        self.segments.append((self.length, self.length + count, generation))
        self.length += count

    def fetch(self, rng):
        layer, begin = rng.randrange(LAYERS), rng.randrange(self.length)
        end = min(self.length, begin + rng.randrange(1, 2048))
        found = self.cache.fetch(layers=(layer,), range=tensor_pb2.TokenRange(begin=begin, end=end))
        for want, got in zip(self.expected(layer, begin, end), found):
            assert want.shape == got.shape and np.abs(want - got).max() < 0.1, (self.name, layer, begin, end)

    def attend(self, rng):
        layer, queries = rng.randrange(LAYERS), np.random.default_rng(rng.randrange(1 << 30))
        q = 0.3 * queries.standard_normal((1, HEADS, WIDTH)).astype(np.float32)
        out, lse = self.cache.attend(self.length - 1, q, layer=layer)
        wanted = attention(q, *self.expected(layer, 0, self.length), self.length - 1)
        assert np.abs(out - wanted[0]).max() < 0.1 and np.abs(lse - wanted[1]).max() < 0.1, (self.name, layer)

    def attend_layers(self, rng):
        q = self.cache.queries(1)
        for layer in range(LAYERS):
            self.cache.attend(self.length - 1, q, layer=layer)

    def truncate(self, rng):
        self.length = rng.randrange(self.length // 2, self.length)
        self.stub.Truncate(kv.TruncateRequest(session=self.name, position=self.length))
        self.segments = [(begin, min(end, self.length), made) for begin, end, made in self.segments
                         if begin < self.length]

    def sink(self, rng):
        self.stub.CloseSession(kv.CloseSessionRequest(session=self.name, keep=True))

    def tiers(self, rng):
        """Down and back: nothing is lost, as the records have it all; first they must be there."""
        self.sink(rng)
        self.stub.Prefetch(kv.PrefetchRequest(session=self.name))
        self.stub.Demote(kv.DemoteRequest(session=self.name, bits=2, even=True))
        self.stub.Prefetch(kv.PrefetchRequest(session=self.name))

    def verify(self):
        for layer in range(LAYERS if self.length > 0 else 0):
            for want, got in zip(self.expected(layer, 0, self.length), self.cache.fetch(layers=(layer,))):
                assert np.abs(want - got).max() < 0.1, (self.name, layer)


class Worker(threading.Thread):
    """Works on sessions of its own until it is told to stop."""

    STEPS = ((Session.append, 50), (Session.fetch, 12), (Session.attend, 6), (Session.attend_layers, 6),
             (Session.truncate, 4), (Session.sink, 2), (Session.tiers, 2), (None, 2))

    def __init__(self, stub, index, rng):
        super().__init__(daemon=True)
        self.stub, self.random = stub, rng
        self.names = [f"soak-{index}-{i}" for i in range(SESSIONS)]  # those that are free; a name comes again
        self.sessions, self.stop, self.steps, self.failure = [], False, 0, None

    def open(self):
        durability = self.random.choice([kv.DURABILITY_ASYNC, kv.DURABILITY_ASYNC, kv.DURABILITY_SYNC])
        self.sessions.append(Session(self.stub, self.names.pop(0), durability))

    def step(self):
        if len(self.sessions) < SESSIONS:
            self.open()
        place = self.random.randrange(len(self.sessions))
        session = self.sessions[place]
        (what,) = self.random.choices(*zip(*self.STEPS))
        if what is None:
            self.stub.CloseSession(kv.CloseSessionRequest(session=session.name))
            self.sessions.pop(place)
            self.names.append(session.name)
        elif session.length == 0 or (what is Session.append and session.length < TOKENS_MAX):
            session.append(self.random)
        elif what is not Session.append and session.length > 1:
            what(session, self.random)

    def run(self):
        try:
            while not self.stop:
                self.step()
                self.steps += 1
        except BaseException as failure:
            self.failure = failure


def sample(daemon, samples, stop):
    while not stop.wait(0.1):
        samples.append(daemon.rss_bytes())


def run(daemon, workers, samples):
    stop = threading.Event()
    sampler = threading.Thread(target=sample, args=(daemon, samples, stop), daemon=True)
    until = time.monotonic() + SECONDS
    def enough():
        assert all(worker.failure is None for worker in workers), [worker.failure for worker in workers]
        return (time.monotonic() > until and daemon.metric("qkvd_storage_evicted_bytes_total") > BUDGET and
                daemon.metric("qkvd_storage_restored_bytes_total") > BUDGET / 4)
    for thread in (sampler, *workers):
        thread.start()
    try:
        while time.monotonic() < until and all(worker.failure is None for worker in workers):
            time.sleep(0.2)
        wait_for(enough, "too little has left memory and come back")
    finally:
        for worker in workers:
            worker.stop = True
        for worker in workers:
            worker.join()
        stop.set()
        sampler.join()
    assert all(worker.failure is None for worker in workers), [worker.failure for worker in workers]


@pytest.mark.parametrize("io", ["uring"] if LARGE else ["uring", "pread"])
def test_soak(tmp_path, io):
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-io", io, "--memory-budget", str(BUDGET),
                 "--storage-segment", "16MiB", "--calibrate-tokens", "0", "--memory-high", "1", "--limit-models", "1000")
    samples = []
    with Daemon(*arguments) as daemon:
        idle = daemon.rss_bytes()
        workers = [Worker(daemon.stub(), i, random.Random(rng.random())) for i in range(WORKERS)]
        run(daemon, workers, samples)
        assert daemon.metric("qkvd_storage_lost_pages_total") == 0
        assert daemon.metric("qkvd_storage_bad_records_total") == 0
        assert daemon.metric("qkvd_kv_bytes") <= BUDGET
        figures = {name: daemon.metric(f"qkvd_storage_{name}") for name in
                   ("pages_total", "evicted_bytes_total", "restored_bytes_total", "read_ahead_bytes_total", "live_bytes")}
    samples.sort()
    print(f"{sum(worker.steps for worker in workers)} steps, idle {idle}, resident median "
          f"{samples[len(samples) // 2]}, most {samples[-1]}, budget {BUDGET}", figures)
    if not SANITIZED:
        assert samples[-1] <= 1.1 * BUDGET, (idle, samples[-1])
    with Daemon(*arguments) as daemon:  # and all of it outlives the daemon
        for worker in workers:
            for session in worker.sessions:
                session.cache.stub = daemon.stub()
                session.verify()
