"""Clients that do harm for as long as they run, each a process of its own: attackers.py NAME HOST:PORT.

They take what processor time others leave (nice), as if they were elsewhere.
"""

import itertools
import os
import resource
import socket
import struct
import sys
import threading
import time

import grpc
import numpy as np

from http2 import (CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, INITIAL_WINDOW_SIZE, PING, PREFACE, RST_STREAM,
                   WINDOW_UPDATE, Raw, data, frame, head, header, request, setting)
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import kv_cache_pb2_grpc, model_pb2, tensor_pb2

APPEND, ATTEND, DECODE, FETCH = (f"/qkv.v1.KvCache/{method}" for method in ("Append", "Attend", "Decode", "Fetch"))
CANCEL = b"\0\0\0\x08"
STREAM_MOST = (1 << 31) - 1
GREEDY = (("qkv-tenant", "greedy"),)


def message(protobuf):
    serialized = protobuf.SerializeToString()
    return head(len(serialized)) + serialized


def connections(address, **fields):
    """One after the other, each as long as the daemon lets it live."""
    while True:
        try:
            raw = Raw(address, keep=4096, **fields)
        except OSError:
            time.sleep(0.05)
            continue
        yield raw
        raw.close()


def flood(address, batches, *settings):
    """So many bytes as the daemon takes; `batches()` makes them for a new connection."""
    for raw in connections(address):
        raw.greet(*settings)
        for batch in batches():
            if not raw.send(batch):
                break


def oversized_headers(address):
    """A header of 1 MiB, in one block."""
    block = request(ATTEND, ("x-large", "a" * (1 << 20)))
    pieces = [block[at:at + 16384] for at in range(0, len(block), 16384)]

    def batches():
        for stream in range(1, STREAM_MOST, 2):
            frames = [frame(HEADERS, 0, stream, pieces[0])]
            frames += [frame(CONTINUATION, 0, stream, piece) for piece in pieces[1:-1]]
            yield b"".join([*frames, frame(CONTINUATION, END_HEADERS, stream, pieces[-1])])
    flood(address, batches)


def many_headers(address):
    """Calls with 12 KiB of headers each, as many as go."""
    block = request(ATTEND, *((f"x-{i}", "v" * 50) for i in range(180)))

    def batches():
        for stream in range(1, STREAM_MOST, 2):
            yield frame(HEADERS, END_HEADERS | END_STREAM, stream, block)
    flood(address, batches)


def continuations(address):
    """A block of headers that does not end."""
    piece = header("x-more", "v" * 16000)

    def batches():
        yield frame(HEADERS, 0, 1, request(ATTEND))
        while True:
            yield frame(CONTINUATION, 0, 1, piece)
    flood(address, batches)


def windows(address):
    """Calls whose answers fit no window, which is opened by a byte, shut and opened again."""
    calls = message(kv.ListSessionsRequest())

    def batches():
        for stream in range(1, STREAM_MOST, 2):
            yield (frame(HEADERS, END_HEADERS, stream, request("/qkv.v1.KvCache/ListSessions")) +
                   data(stream, calls, END_STREAM) + frame(WINDOW_UPDATE, 0, stream, b"\0\0\0\1") +
                   setting((INITIAL_WINDOW_SIZE, stream % 3)))
    flood(address, batches, (INITIAL_WINDOW_SIZE, 0))


def elsewhere(_):
    """No attack: pings to a process that discards them. What it costs others is the machine's doing."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        while theirs.recv(65536):
            pass
        os._exit(0)
    theirs.close()
    batch = frame(PING, payload=b"12345678") * 500
    while True:
        ours.sendall(batch)


def rapid_reset(address):
    """Calls that are cancelled as they are made."""
    block = request(ATTEND)

    def batches():
        for first in range(1, STREAM_MOST, 200):
            yield b"".join(frame(HEADERS, END_HEADERS, stream, block) + frame(RST_STREAM, 0, stream, CANCEL)
                           for stream in range(first, first + 200, 2))
    flood(address, batches)


def settings(address):
    flood(address, lambda: itertools.repeat(setting((INITIAL_WINDOW_SIZE, 65535)) * 500))


def pings(address):
    flood(address, lambda: itertools.repeat(frame(PING, payload=b"12345678") * 500))


def garbage(address):
    for raw in connections(address):
        raw.send(PREFACE + os.urandom(65536) if os.urandom(1)[0] % 2 else os.urandom(65536))


def reconnects(address):
    """Connections that greet and are reset, one after the other, as fast as they come."""
    host, port = address.rsplit(":", 1)
    while True:
        try:
            with socket.create_connection((host, int(port))) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no port stays in use
                connection.sendall(PREFACE + setting())
        except OSError:
            time.sleep(0.01)


def half_open(address, count):
    """Calls on so many connections on which nothing is sent; those that are cut off come again."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    host, port = address.rsplit(":", 1)
    calls = max(1, 2000 // count)
    sent = PREFACE + setting() + b"".join(frame(HEADERS, END_HEADERS, 2 * i + 1, request(ATTEND)) for i in range(calls))
    held = []
    for i in range(count):
        try:
            # 4,000 of each address, which may have half of limit-connections
            held.append(socket.create_connection((host, int(port)), source_address=(f"127.0.0.{2 + i // 4000}", 0)))
            held[-1].sendall(sent)
        except OSError:
            pass
    print(f"{len(held)} connections", flush=True)
    while True:
        time.sleep(1)


def half_messages(address):
    """Messages of 60 MiB that are never finished."""
    for raw in connections(address):
        raw.greet((INITIAL_WINDOW_SIZE, 1 << 20))
        for stream in range(1, 41, 2):
            raw.send(frame(HEADERS, END_HEADERS, stream, request(APPEND)))
        for stream in range(1, 41, 2):
            raw.upload(stream, 60 << 20, (60 << 20) - 1000, 0.3)


def unread(address):
    """Fetches of a session, none of whose rows are read."""
    stub = greedy_session(address)[0]
    sent = message(kv.FetchRequest(session="greedy"))
    held = []
    for _ in range(8):
        raw = Raw(address, keep=4096)
        held.append(raw)
        raw.greet((INITIAL_WINDOW_SIZE, 0))
        for stream in range(1, 1001, 2):
            raw.send(frame(HEADERS, END_HEADERS, stream, request(FETCH, *GREEDY)) + data(stream, sent, END_STREAM))
    print(f"{len(held)} connections of {stub}", flush=True)
    while True:
        time.sleep(1)


def ahead(address):
    """Messages that are sent ahead on streams whose answers are not read."""
    first = message(small_attend(address))
    held = [Raw(address, keep=4096) for _ in range(2)]
    for raw in held:
        raw.greet((INITIAL_WINDOW_SIZE, 0))
        raw.windows[0] -= 400 * len(first)
        raw.send(b"".join(frame(HEADERS, END_HEADERS, stream, request(DECODE, *GREEDY)) + data(stream, first)
                          for stream in range(1, 801, 2)))
    while True:
        for raw in held:
            for stream in range(1, 801, 2):
                raw.upload(stream, 60000, 60005, 0)
        time.sleep(0.001)


def streams_that_go_on(address):
    """Streams that have been answered, and hold their places."""
    sent = message(small_attend(address))
    held = [Raw(address, keep=4096) for _ in range(4)]
    for raw in held:
        raw.greet()
        raw.send(b"".join(frame(HEADERS, END_HEADERS, stream, request(DECODE, *GREEDY)) + data(stream, sent)
                          for stream in range(1, 801, 2)))
    while True:
        time.sleep(1)


def small_attend(address):
    """Of a session of one token: some hundred bytes, so that 400 fit into the window of a connection."""
    name = f"small-{os.getpid()}"
    stub = kv_cache_pb2_grpc.KvCacheStub(grpc.insecure_channel(address))
    model = model_pb2.Model(name="small", layers=1, kv_heads=1, q_heads=1, key_dim=16, value_dim=16, dtype=tensor_pb2.DTYPE_FP16)
    row = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FP16, dims=(1, 1, 16), data=bytes(32))
    stub.RegisterModel(model_pb2.RegisterModelRequest(model=model), metadata=GREEDY)
    stub.OpenSession(kv.OpenSessionRequest(session=name, model="small"), metadata=GREEDY)
    stub.Append(iter([kv.AppendRequest(items=[kv.Item(session=name, k=row, v=row)])]), metadata=GREEDY)
    return kv.AttendRequest(items=[kv.Item(session=name, q=row)])


def greedy_session(address):
    stub = kv_cache_pb2_grpc.KvCacheStub(grpc.insecure_channel(address))
    model = model_pb2.Model(name="greedy", layers=1, kv_heads=8, q_heads=32, key_dim=128, value_dim=128,
                            dtype=tensor_pb2.DTYPE_FP16)
    stub.RegisterModel(model_pb2.RegisterModelRequest(model=model), metadata=GREEDY)
    try:
        stub.OpenSession(kv.OpenSessionRequest(session="greedy", model="greedy"), metadata=GREEDY)
    except grpc.RpcError:
        pass
    rows = np.random.default_rng(1).standard_normal((1024, 8, 128)).astype("<f2")
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FP16, dims=rows.shape, data=rows.tobytes())
    at = stub.GetSession(kv.GetSessionRequest(session="greedy"), metadata=GREEDY).lengths[0]
    for position in range(at, 8192, 1024):
        item = kv.Item(session="greedy", position=position, k=tensor, v=tensor)
        stub.Append(iter([kv.AppendRequest(items=[item])]), metadata=GREEDY)
    return stub, tensor


def appends_and_attends(address, threads=16):
    """A tenant that appends and attends from as many threads as it likes."""
    greedy_session(address)
    queries = np.random.default_rng(2).standard_normal((16, 32, 128)).astype("<f2")
    q = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FP16, dims=queries.shape, data=queries.tobytes())

    def work(number):
        stub, rows = greedy_session(address)
        session, position = f"greedy-{number}", 0
        while True:
            try:
                if position == 0:
                    stub.OpenSession(kv.OpenSessionRequest(session=session, model="greedy"), metadata=GREEDY)
                item = kv.Item(session=session, position=position, k=rows, v=rows)
                stub.Append(iter([kv.AppendRequest(items=[item])]), metadata=GREEDY)
                position += 1024
                for _ in range(4):
                    item = kv.Item(session="greedy", position=8192, q=q)
                    stub.Attend(kv.AttendRequest(items=[item]), metadata=GREEDY)
                if position >= 8192:
                    stub.CloseSession(kv.CloseSessionRequest(session=session), metadata=GREEDY)
                    position = 0
            except grpc.RpcError:
                time.sleep(0.01)

    for number in range(threads):
        threading.Thread(target=work, args=(number,), daemon=True).start()
    while True:
        time.sleep(1)


def appends_that_wait(address, sync, threads=32):
    """A tenant whose appends wait for its quota: of memory, where its only session that can leave is in use all the time, or,
    with `sync`, of the SSD. None of the sessions that append can go, as they are pinned."""
    model = model_pb2.Model(name="waits", layers=1, kv_heads=1, q_heads=1, key_dim=64, value_dim=64, dtype=tensor_pb2.DTYPE_FP16)
    policy = model_pb2.CodecPolicy(recent_window=0 if sync else 1 << 20)
    data = np.random.default_rng(1).standard_normal((32, 1, 64)).astype("<f2").tobytes()
    row = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FP16, dims=(1, 1, 64), data=data[:128])
    rows = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FP16, dims=(32, 1, 64), data=data)
    kept = kv.DURABILITY_SYNC if sync else kv.DURABILITY_UNSPECIFIED

    def open_session(name):
        options = [("grpc.use_local_subchannel_pool", 1)]
        stub = kv_cache_pb2_grpc.KvCacheStub(grpc.insecure_channel(address, options=options))
        stub.RegisterModel(model_pb2.RegisterModelRequest(model=model), metadata=GREEDY)
        request = kv.OpenSessionRequest(session=name, model=model.name, policy=policy, durability=kept)
        stub.OpenSession(request, metadata=GREEDY)
        return stub

    def append(stub, session, position):
        item = kv.Item(session=session, position=position, k=rows, v=rows)
        stub.Append(iter([kv.AppendRequest(items=[item])]), metadata=GREEDY)

    def use(stub, last):
        while True:
            try:
                stub.Attend(kv.AttendRequest(items=[kv.Item(session="used", position=last, q=row)]), metadata=GREEDY)
            except grpc.RpcError:
                pass
            time.sleep(0.02)

    def work(number):
        session = f"waits-{number}"
        stub = open_session(session)
        stub.Pin(kv.PinRequest(session=session), metadata=GREEDY)
        while True:
            try:
                append(stub, session, stub.GetSession(kv.GetSessionRequest(session=session), metadata=GREEDY).lengths[0])
            except grpc.RpcError:
                time.sleep(0.01)

    if not sync:
        used = open_session("used")
        for position in range(0, 13500, 32):  # 3.3 MiB of exact rows
            append(used, "used", position)
        threading.Thread(target=use, args=(used, 13500), daemon=True).start()
    for number in range(threads):
        threading.Thread(target=work, args=(number,), daemon=True).start()
    while True:
        time.sleep(1)


CONTROL = "none, but a process that sends to another"
ATTACKS = {
    CONTROL: elsewhere,
    "oversized headers": oversized_headers,
    "many headers": many_headers,
    "continuations": continuations,
    "windows": windows,
    "rapid reset": rapid_reset,
    "settings": settings,
    "pings": pings,
    "garbage": garbage,
    "reconnects": reconnects,
    "half-open calls, 1 connection": lambda address: half_open(address, 1),
    "half-open calls, 100 connections": lambda address: half_open(address, 100),
    "half-open calls, 10000 connections": lambda address: half_open(address, 10000),
    "half messages": half_messages,
    "messages ahead": ahead,
    "streams that go on": streams_that_go_on,
    "unread answers": unread,
    "appends and attends": appends_and_attends,
}


# For waiting.py: each needs a quota of the tenant `greedy`.
WAITS = {
    "host_bytes": ("4MiB", lambda address: appends_that_wait(address, False)),
    "ssd_bytes": ("1", lambda address: appends_that_wait(address, True)),
}


def memory_bound(name):
    """MiB by which the daemon may grow, as docs/security.md says."""
    return 768 if name == "unread answers" else 512


if __name__ == "__main__":
    os.nice(19)
    print("begins", flush=True)
    attack = WAITS[sys.argv[1]][1] if sys.argv[1] in WAITS else ATTACKS[sys.argv[1]]
    attack(sys.argv[2])
