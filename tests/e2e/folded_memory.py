"""Resident memory of many sessions that are sunk, or of forks of one session that stays in memory, and the first attend of
each of some: by hand, with the environment of an e2e test (ctest --test-dir build/release -V -N -R e2e/folded prints it):

    python3 tests/e2e/folded_memory.py [SESSIONS [TOKENS [forks]]]
"""

import random
import sys
import tempfile
import threading
import time

import numpy as np

from daemon import Daemon
from kv import FP16, TIMEOUT, tensor
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2

SESSIONS = int(sys.argv[1]) if len(sys.argv) > 1 else 10000
TOKENS = int(sys.argv[2]) if len(sys.argv) > 2 else 64
FORKS = "forks" in sys.argv[3:]
LAYERS, DIM, CLIENTS, ATTENDS = 32, 16, 4, 300


def resident(daemon):
    with open(f"/proc/{daemon.process.pid}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def make(stub, name, rows, first_id):
    ids = [(first_id + j) % 100000 for j in range(TOKENS)]
    stub.OpenSession(kv.OpenSessionRequest(session=name, model="m"), timeout=TIMEOUT)
    items = [kv.Item(session=name, layer=layer, position=0, k=rows, v=rows, token_ids=ids) for layer in range(LAYERS)]
    stub.Append(iter([kv.AppendRequest(items=items)]), timeout=TIMEOUT)


def fill(stub, first, rows):
    """Every CLIENTS-th session, from the first one on."""
    for i in range(first, SESSIONS, CLIENTS):
        name = f"session-{i}"
        if FORKS:
            stub.Fork(kv.ForkRequest(session="parent", fork=name), timeout=TIMEOUT)
        else:
            make(stub, name, rows, i * 7)
            stub.CloseSession(kv.CloseSessionRequest(session=name, keep=True), timeout=TIMEOUT)


def attend(stub):
    q, times = tensor(np.ones((1, 1, DIM), np.float32), FP16), []
    for i in random.Random(2).sample(range(SESSIONS), min(ATTENDS, SESSIONS)):
        began = time.perf_counter()
        item = kv.Item(session=f"session-{i}", layer=0, position=TOKENS - 1, q=q)
        stub.Attend(kv.AttendRequest(items=[item]), timeout=TIMEOUT)
        times.append(1e3 * (time.perf_counter() - began))
    times.sort()
    return times[len(times) // 2], times[int(len(times) * 0.99)]


def run(fold_after, directory):
    with Daemon("--data-dir", directory, "--calibrate-tokens", "0", "--memory-budget", "4GiB", "--fold-after", fold_after,
                "--durability", "async") as daemon:
        stub = daemon.stub()
        stub.RegisterModel(model_pb2.RegisterModelRequest(model=model_pb2.Model(
            name="m", layers=LAYERS, kv_heads=1, q_heads=1, key_dim=DIM, value_dim=DIM, dtype=FP16,
            policy=model_pb2.CodecPolicy(recent_window=0, bits_k=4, bits_v=4))), timeout=TIMEOUT)
        rows = tensor(np.random.default_rng(1).standard_normal((TOKENS, 1, DIM)).astype(np.float32), FP16)
        if FORKS:
            make(stub, "parent", rows, 0)
            while min(stub.GetSession(kv.GetSessionRequest(session="parent"), timeout=TIMEOUT).durable) < TOKENS:
                time.sleep(0.1)
        before = resident(daemon)
        clients = [threading.Thread(target=fill, args=(stub, first, rows)) for first in range(CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        began = time.monotonic()
        while fold_after != "0" and daemon.metric("qkvd_storage_folded_sessions") < SESSIONS:
            time.sleep(0.1)
        print(f"fold-after {fold_after}: folded {time.monotonic() - began:.1f} s later")
        time.sleep(12)  # what is free goes back to the machine
        print(f"resident {before / 1e6:.0f} MB before, {resident(daemon) / 1e6:.0f} MB with {SESSIONS} sessions")
        print("first attend of a layer, ms, p50 and p99: {:.2f} {:.2f}".format(*attend(stub)))


if __name__ == "__main__":
    for after in "0", "1s":
        with tempfile.TemporaryDirectory() as made:
            run(after, made)
