#!/usr/bin/env python3
"""What HasSessions takes: 1000 names among 10000 open sessions of 32 layers, of which every other one has rows.

Starts a qkvd of QKV_BIN_DIR on a unix socket. Wall times of the bare calls, whose requests were packed before.
"""

import os
import random
import sys
import time

import numpy as np

import qkvd
from qkvd.v1 import kv_cache_pb2

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests"))
from daemon import Daemon

SESSIONS, NAMES, LAYERS, ROUNDS = 10000, 1000, 32, 400


def main():
    with Daemon("--limit-sessions", str(SESSIONS)) as daemon, qkvd.Client(daemon.target) as client:
        client.register_model(qkvd.Model(name="m", layers=LAYERS, kv_heads=1, q_heads=1, key_dim=64, value_dim=64))
        names = [f"session-{i}" for i in range(SESSIONS)]
        rows = np.zeros((1, 1, 64), np.float16)
        for i, name in enumerate(names):
            session = client.open(name, model="m")
            if i % 2 == 0:
                session.append(0, rows, rows)
        call = client._stub("unary_unary", "/qkv.v1.KvCache/HasSessions")
        for tokens in (False, True):
            times = []
            for _ in range(ROUNDS):
                request = kv_cache_pb2.HasSessionsRequest(sessions=random.sample(names, NAMES), tokens=tokens)
                packed = request.SerializeToString()
                begin = time.perf_counter()
                call(packed)
                times.append(1e6 * (time.perf_counter() - begin))
            times.sort()
            p = [times[ROUNDS * share // 100] for share in (0, 50, 90)]
            print(f"tokens {tokens}: least {p[0]:.0f} us, p50 {p[1]:.0f}, p90 {p[2]:.0f}")


if __name__ == "__main__":
    main()
