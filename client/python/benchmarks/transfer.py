#!/usr/bin/env python3
"""What the client costs: processor seconds a GB of rows in and out, and the latency of a decode step.

Starts a qkvd of QKV_BIN_DIR, with exact rows, on a unix socket. Each figure is the median of --rounds rounds, with the
lowest and the highest; processor time is that of this process, all of its threads. The rows "generated classes" are the
same calls with protobuf's classes and stubs. Rows are fp16, 8 KV heads of 128 (4 KiB a token), steps have 32 query heads.
"""

import argparse
import os
import statistics
import sys
import time

import numpy as np

import qkvd
from qkvd.v1 import kv_cache_pb2, tensor_pb2

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests"))
from daemon import Daemon

TOKENS, KV_HEADS, Q_HEADS, DIM = 16384, 8, 32, 128
CHUNK = 256  # tokens in 1 MiB


def compare(works, rounds, scale, unit):
    """Each of the works once a round, one after the other; prints a line for each: its medians, lowest and highest.

    A work gives what it has taken, (processor seconds, wall seconds).
    """
    times = {what: [] for what in works}
    for _ in range(rounds):
        for what, work in works.items():
            times[what].append(work())
    for what, pairs in times.items():
        columns = ([scale * value for value in column] for column in zip(*pairs, strict=True))
        figures = [f"{statistics.median(column):.3g} ({min(column):.3g} to {max(column):.3g})" for column in columns]
        print(f"| {what} | {figures[0]} | {figures[1]} | {unit} |", flush=True)


def timed(work):
    begin = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - begin[0], time.perf_counter() - begin[1]


def tensor(array):
    return tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FP16, dims=array.shape, data=array.tobytes())


class Generated:
    """The same calls by generated classes."""

    def __init__(self, client, session):
        self.session = session
        client.status()  # opens the channel
        channel = client._channel
        self.append_call = channel.stream_unary(
            "/qkv.v1.KvCache/Append",
            kv_cache_pb2.AppendRequest.SerializeToString,
            kv_cache_pb2.AppendResponse.FromString,
        )
        self.fetch_call = channel.unary_stream(
            "/qkv.v1.KvCache/Fetch",
            kv_cache_pb2.FetchRequest.SerializeToString,
            kv_cache_pb2.FetchResponse.FromString,
        )
        self.attend_call = channel.unary_unary(
            "/qkv.v1.KvCache/Attend",
            kv_cache_pb2.AttendRequest.SerializeToString,
            kv_cache_pb2.AttendResponse.FromString,
        )

    def item(self, position, **tensors):
        return kv_cache_pb2.Item(
            session=self.session, position=position, **{name: tensor(array) for name, array in tensors.items()}
        )

    def append(self, k, v):
        pieces = range(0, len(k), CHUNK)
        self.append_call(
            kv_cache_pb2.AppendRequest(items=[self.item(at, k=k[at : at + CHUNK], v=v[at : at + CHUNK])]) for at in pieces
        )

    def fetch(self, k, v):
        for piece in self.fetch_call(kv_cache_pb2.FetchRequest(session=self.session)):
            end = piece.position + piece.k.dims[0]
            k[piece.position : end] = np.frombuffer(piece.k.data, np.float16).reshape(piece.k.dims)
            v[piece.position : end] = np.frombuffer(piece.v.data, np.float16).reshape(piece.v.dims)

    def step(self, position, k, v, q):
        answer = self.attend_call(kv_cache_pb2.AttendRequest(items=[self.item(position, k=k, v=v, q=q)]))
        result = answer.results[0]
        np.frombuffer(result.out.data, np.float32).reshape(result.out.dims)


def transfers(client, rounds):
    k, v = (
        np.random.default_rng(i).standard_normal((TOKENS, KV_HEADS, DIM), np.float32).astype(np.float16) for i in (1, 2)
    )
    out = np.empty_like(k), np.empty_like(v)
    generated = Generated(client, "transfer")

    def fresh(work):
        def run():
            with client.open("transfer", model="m", policy=qkvd.EXACT) as session:
                return timed(lambda: work(session))

        return run

    works = {
        "append": fresh(lambda session: session.append(0, k, v)),
        "append, generated classes": fresh(lambda _: generated.append(k, v)),
    }
    per_gb = 1e9 / (k.nbytes + v.nbytes)
    compare(works, rounds, per_gb, "s a GB")

    with client.open("transfer", model="m", policy=qkvd.EXACT) as session:
        session.append(0, k, v)

        def views():
            for _ in client.fetch_rows("transfer"):
                pass

        works = {
            "fetch, into the caller's arrays": lambda: timed(lambda: session.fetch(0, out=out)),
            "fetch, into new arrays": lambda: timed(lambda: session.fetch(0)),
            "fetch_rows, not copied": lambda: timed(views),
            "fetch, generated classes": lambda: timed(lambda: generated.fetch(*out)),
        }
        compare(works, rounds, per_gb, "s a GB")
    assert np.array_equal(out[0], k) and np.array_equal(out[1], v)


def steps(client, rounds, context, count=200):
    """A decode step: one row in, one query, attention over `context` tokens."""
    random = np.random.default_rng(3)
    k, v, q = (random.standard_normal((context, heads, DIM), np.float32).astype(np.float16) for heads in (8, 8, 32))

    def loop(step):
        def run():
            with client.open("steps", model="m", policy=qkvd.EXACT) as session:
                session.append(0, k, v)
                return timed(lambda: [step(session, context + i) for i in range(count)])

        return run

    def stream():
        with client.decode() as decode:
            one = {"session": "steps", "k": k[:1], "v": v[:1], "q": q[:1]}
            return loop(lambda _, position: decode.attend([qkvd.Item(position=position, **one)]))()

    generated = Generated(client, "steps")
    works = {
        f"step over {context} tokens": loop(lambda session, _: session.attend(0, q[:1], k=k[:1], v=v[:1])),
        f"step over {context} tokens, decode stream": stream,
        f"step over {context} tokens, generated classes": loop(lambda _, at: generated.step(at, k[:1], v[:1], q[:1])),
        "session_info": loop(lambda *_: client.session_info("steps")),
    }
    compare(works, rounds, 1e6 / count, "us")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--native", action="store_true", help="by libqkv: needs qkvd-native; without it all goes by grpcio")
    parser.add_argument("--context", type=int, default=512, metavar="TOKENS", help="of a decode step (512)")
    options = parser.parse_args()
    with Daemon() as daemon, qkvd.Client(daemon.target, native=options.native) as client:
        client.register_model(
            qkvd.Model(name="m", layers=1, kv_heads=KV_HEADS, q_heads=Q_HEADS, key_dim=DIM, value_dim=DIM)
        )
        print("| what | processor time | wall time | |\n|---|---|---|---|")
        transfers(client, options.rounds)
        steps(client, options.rounds, options.context)


if __name__ == "__main__":
    main()
