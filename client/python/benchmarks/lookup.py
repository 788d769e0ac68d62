#!/usr/bin/env python3
"""What lookups take. Starts qkvds of QKV_BIN_DIR on unix sockets.

HasSessions: 1000 names among 10000 open sessions of 32 layers, of which every other one has rows in all of them. Wall times
of the bare calls, whose requests were packed before, and of `Client.has_sessions`.
Match: a prompt of 131072 ids, a list, as an engine's connector asks for it: packing included. Processor time of the calling
thread, for which an engine's scheduler does nothing else, and wall time.
"""

import logging
import os
import random
import statistics
import sys
import time

import numpy as np

import qkvd
from qkvd.prefixes import Options, Prefixes
from qkvd.v1 import kv_cache_pb2

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests"))
from daemon import Daemon

SESSIONS, NAMES, LAYERS, ROUNDS = 10000, 1000, 32, 400
PROMPT = 131072


def has_sessions():
    with Daemon("--limit-sessions", str(SESSIONS)) as daemon, qkvd.Client(daemon.target) as client:
        client.register_model(qkvd.Model(name="m", layers=LAYERS, kv_heads=1, q_heads=1, key_dim=64, value_dim=64))
        names = [f"session-{i}" for i in range(SESSIONS)]
        rows = np.zeros((1, 1, 64), np.float16)
        for i, name in enumerate(names):
            client.open(name, model="m")
            if i % 2 == 0:
                client.append([qkvd.Item(session=name, layer=layer, k=rows, v=rows, position=0) for layer in range(LAYERS)])
        call = client._stub("unary_unary", "/qkv.v1.KvCache/HasSessions")
        for tokens in (False, True):
            bare, whole = [], []
            for _ in range(ROUNDS):
                asked = random.sample(names, NAMES)
                packed = kv_cache_pb2.HasSessionsRequest(sessions=asked, tokens=tokens).SerializeToString()
                begin = time.perf_counter()
                call(packed)
                bare.append(1e6 * (time.perf_counter() - begin))
                begin = time.perf_counter()
                client.has_sessions(asked, tokens=tokens)
                whole.append(1e6 * (time.perf_counter() - begin))
            for what, times in (("bare call", bare), ("has_sessions", whole)):
                times.sort()
                p = [times[ROUNDS * share // 100] for share in (0, 50, 90)]
                print(f"{what}, tokens {tokens}: least {p[0]:.0f} us, p50 {p[1]:.0f}, p90 {p[2]:.0f}", flush=True)


def match():
    model = qkvd.Model(name="m", layers=1, kv_heads=1, q_heads=1, key_dim=64, value_dim=64)
    random.seed(1)
    prompt = [random.randrange(128_000) for _ in range(PROMPT)]
    others = {
        "held": (prompt, PROMPT), "half of it is held": (prompt[: PROMPT // 2] * 2, PROMPT // 2),
        "not held": (prompt[::-1], 0),
    }  # fmt: skip
    with Daemon() as daemon:
        prefixes = Prefixes(Options(target=daemon.target, lookup_timeout=5), model, logging.getLogger())
        k = np.zeros((PROMPT, 1, 64), np.float16)
        prefixes.open("s", prompt, b"")
        prefixes.append("s", 0, prompt, [(k, k)])
        for what, (ids, held) in others.items():
            times = []
            for _ in range(ROUNDS):
                begin = time.thread_time(), time.perf_counter()
                found = prefixes.match(ids, b"")
                times.append((time.thread_time() - begin[0], time.perf_counter() - begin[1]))
                assert found.tokens == held
            own, wall = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
            print(f"{PROMPT} tokens, {what}: {own:.2f} ms of the thread's processor time, wall {wall:.2f} ms")
        prefixes.close()


def main():
    match()
    has_sessions()


if __name__ == "__main__":
    main()
