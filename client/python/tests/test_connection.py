"""Connections: deadlines, repeats, a daemon that goes and comes back, threads, TLS and tokens."""

import asyncio
import contextlib
import gc
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent import futures
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from conftest import DIM, KV_HEADS
from daemon import PATIENCE, Daemon, wait_for

import qkvd
from qkvd import waits
from qkvd.locks import calls_under_way
from qkvd.v1 import admin_pb2, kv_cache_pb2, objects_pb2


def test_import_opens_nothing():
    """Neither a thread nor a descriptor before the first call."""
    code = """if True:
        import os, threading, qkvd
        client = qkvd.Client("unix:/nobody")
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        opened = [os.readlink(link) for link in links if os.path.exists(link)]
        assert not [link for link in opened if "socket" in link], opened
        assert len(os.listdir("/proc/self/task")) == 1, threading.enumerate()"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})


def test_freed_memory_is_kept():
    """Blocks of some MiB are not mapped one by one, each with pages of zeros: malloc counts those that are."""
    code = """if True:
        import ctypes, qkvd
        libc = ctypes.CDLL(None)
        class Figures(ctypes.Structure):
            _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks a b c d e f".split()]
        libc.mallinfo2.restype, libc.malloc.restype = Figures, ctypes.c_void_p
        before = libc.mallinfo2().hblks
        libc.malloc(7 << 20)
        assert libc.mallinfo2().hblks == before"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nobody_answers(monkeypatch):
    class Enough(Exception):
        pass

    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            raise Enough

    with qkvd.Client("unix:/nobody/here", retry_for=0) as client:
        with pytest.raises(qkvd.Unavailable, match="nobody/here") as caught:
            client.status()
        assert isinstance(caught.value, ConnectionError) and caught.value.code is grpc.StatusCode.UNAVAILABLE
    with qkvd.Client("unix:/nobody/here", retry_for=PATIENCE, timeout=PATIENCE) as client:
        monkeypatch.setattr(client, "_sleep", pause)
        with pytest.raises(qkvd.Unavailable):
            client.open("x", model="m")  # is not sent again
        assert not pauses
        with pytest.raises(Enough):
            client.status()
        assert pauses == sorted(pauses) and pauses[0] >= 0.025
    with pytest.raises(qkvd.FailedPrecondition, match="closed"):
        client.status()


def test_deadline(daemon, model, session):
    with daemon.stopped(), qkvd.Client(daemon.target, timeout=0.3) as client:
        with pytest.raises(qkvd.DeadlineExceeded, match=r"GetSession was not answered within 0.3 s"):
            client.session_info(session.name)
        with pytest.raises(TimeoutError, match=r"within 0.2 s"):
            list(client.fetch_rows(session.name, timeout=0.2))
        with client.decode() as stream:
            item = qkvd.Item(session=session.name, q=np.zeros((1, 4, DIM), np.float32))
            for _ in range(2):
                with pytest.raises(qkvd.DeadlineExceeded, match=r"Decode was not answered within 0.2 s"):
                    stream.attend([item], timeout=0.2)


def test_endless_patience(daemon, name, model, rows, queries):
    with qkvd.Client(daemon.target, timeout=math.inf) as client, client.open(name, model=model.name) as session:
        session.append(0, *rows(1000))
        assert len(session.fetch(0)[0]) == 1000 and client.status().state == "serving"
        with client.decode() as stream:
            stream.attend([qkvd.Item(session=name, q=queries(1))], timeout=math.inf)

    async def work():
        async with qkvd.AsyncClient(daemon.target, timeout=math.inf) as client:
            return await client.status()

    assert asyncio.run(work()).state == "serving"


def functions_of(thread):
    """Where a thread is."""
    frame, names = sys._current_frames().get(thread), []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def test_an_interrupted_step_ends_the_decode_stream(daemon, client, session, rows, queries):
    """Its answer, which comes all the same, is not the next step's."""

    class Interrupt(BaseException):
        pass

    def interrupt(*_):
        raise Interrupt

    session.append(0, *rows(3))
    item = qkvd.Item(session=session.name, q=queries(1))
    own = threading.get_ident()

    def interrupt_a_wait():
        wait_for(lambda: "_next" in functions_of(own), "the step does not wait")
        signal.pthread_kill(own, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with client.decode() as stream:
            stream.attend([item])
            with daemon.stopped(), pytest.raises(Interrupt):
                threading.Thread(target=interrupt_a_wait).start()
                stream.attend([item])
            with pytest.raises(qkvd.Cancelled, match="broken off"):
                stream.attend([item])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert calls_under_way._streams == 0


def test_streams_that_do_not_begin_are_not_counted(client, session, queries, monkeypatch):
    """Without a thread for their watches; a fork would find them open for ever."""
    item = qkvd.Item(session=session.name, q=queries(1))

    def none_left(*_, **__):
        raise RuntimeError("can't start new thread")

    with client.decode() as stream:
        monkeypatch.setattr("qkvd.decode.threading", SimpleNamespace(Thread=none_left))
        with pytest.raises(RuntimeError):
            stream.attend([item])
    monkeypatch.setattr("qkvd.waits.Watch.start", none_left)
    with pytest.raises(RuntimeError):
        list(client.fetch_rows(session.name))
    assert calls_under_way._streams == 0


def test_a_stream_that_is_not_closed_ends_with_its_object(daemon, client, session, rows, queries):
    """Also one in a cycle, and one of several daemons."""
    session.append(0, *rows(3))
    item = qkvd.Item(session=session.name, q=queries(1))

    def watches():
        return [thread for thread in threading.enumerate() if thread.name == "qkvd-decode-watch"]

    def ended():
        return calls_under_way._streams == 0 and not watches()

    assert ended()
    with qkvd.Client(f"{daemon.target},{daemon.tcp}", placement=session.name) as several:
        for one in (client, several):
            stream = one.decode()
            stream.attend([item])
            assert calls_under_way._streams == 1 and len(watches()) == 1
            del stream
            wait_for(ended, "the stream goes on")
            stream = one.decode()
            stream.own = stream
            stream.attend([item])
            del stream
            gc.collect()
            wait_for(ended, "the stream goes on")


def test_a_stream_that_ends_while_calls_are_counted(client, session, rows, queries):
    """The collector of garbage may find it in the middle of that, on the same thread."""
    session.append(0, *rows(3))
    stream = client.decode()
    stream.attend([qkvd.Item(session=session.name, q=queries(1))])
    held = [stream]
    del stream

    def end():
        with calls_under_way._changed:
            held.clear()
        done.set()

    done = threading.Event()
    threading.Thread(target=end, daemon=True).start()
    assert done.wait(20)
    assert calls_under_way._streams == 0


def begun(watches):
    """A watch whose first message has come in time."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        watch = watches()
        with contextlib.suppress(qkvd.DeadlineExceeded):
            assert next(watch).reset
            return watch
    raise AssertionError("no message comes")


def test_a_watch_of_a_daemon_that_says_nothing(daemon, monkeypatch):
    monkeypatch.setattr("qkvd.calls.WATCH_PATIENCE", 0.5)
    with qkvd.Client(daemon.target, timeout=0.2) as client:
        watch = begun(client.watch)
        time.sleep(1)  # in which nobody waits for a message
        with daemon.stopped(), pytest.raises(qkvd.DeadlineExceeded, match=r"Watch was not answered within 0.5 s"):
            for _ in watch:
                pass
    assert calls_under_way._streams == 0


def test_a_client_is_closed_under_a_call(daemon, monkeypatch):
    under_way, wait = threading.Event(), waits.answer
    monkeypatch.setattr(waits, "answer", lambda *arguments: under_way.set() or wait(*arguments))
    for call in (lambda client: client.close_session("none"), lambda client: client.session_info("none")):
        with daemon.stopped():
            client, failures = qkvd.Client(daemon.target), []

            def work(client=client, call=call, failures=failures):
                try:
                    call(client)
                except qkvd.Error as error:
                    failures.append(error)

            under_way.clear()
            thread = threading.Thread(target=work)
            thread.start()
            assert under_way.wait(PATIENCE)
            client.close()
            thread.join()
        assert [type(failure) for failure in failures] == [qkvd.Cancelled]


@pytest.mark.parametrize(
    "call",
    [
        lambda client, rows: client.status(),
        lambda client, rows: client.put_object("o", b"x"),
        lambda client, rows: client.append([qkvd.Item(session="s", k=rows, v=rows)]),
        lambda client, rows: list(client.fetch_rows("s")),
        lambda client, rows: next(client.watch()),
        lambda client, rows: client.decode().attend([qkvd.Item(session="s", q=rows[:1])]),
    ],
)
def test_a_client_is_closed_a_moment_before_a_call(daemon, call):
    """By another thread, after the call has begun."""
    client = qkvd.Client(daemon.target, native=False)
    stub = client._stub

    def begin(kind, method):
        begun = stub(kind, method)
        client.close()
        return begun

    client._stub = begin
    with pytest.raises(qkvd.FailedPrecondition, match="the client is closed"):
        call(client, np.zeros((3000, 2, DIM), np.float32))
    assert calls_under_way._streams == 0


LARGE = {  # calls whose messages are more than a socket takes from a daemon that does not read
    "append": lambda client, rows: client.append([qkvd.Item(session="s", k=rows, v=rows, position=0)], timeout=0.2),
    "attend": lambda client, rows: client.attend([qkvd.Item(session="s", k=rows, v=rows, position=0)], timeout=0.2),
    "match": lambda client, rows: client.match("m", np.arange(400_000), timeout=0.2),
    "put": lambda client, rows: client.put_object("o", rows, timeout=0.2),
    "get": lambda client, rows: client.get_objects([f"{i:0128}" for i in range(16384)], timeout=0.2),
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_daemon_that_stops_reading(kind):
    """In the middle of a message: the deadline holds, and closing the client waits for nothing."""
    rows = np.ones((50_000, KV_HEADS, DIM), np.float32)
    # A socket takes little of what follows where messages of before have shown how much the daemon reads.
    with Daemon() as daemon, futures.ThreadPoolExecutor(1) as pool, qkvd.Client(daemon.target, native=False) as client:
        model = {"name": "m", "layers": 1, "kv_heads": KV_HEADS, "q_heads": KV_HEADS, "key_dim": DIM, "value_dim": DIM}
        client.register_model(qkvd.Model(**model, dtype="fp32", policy=qkvd.EXACT))
        client.open("s", model="m").append(0, rows, rows)
        other = qkvd.Client(daemon.target, native=False)
        other.append([qkvd.Item(session="s", k=rows, v=rows, position=0)])
        with daemon.stopped():
            for _ in range(2):
                with pytest.raises(qkvd.DeadlineExceeded, match=r"was not answered within 0\.2 s"):
                    pool.submit(LARGE[kind], client, rows).result(60)
            with pytest.raises(qkvd.DeadlineExceeded):
                pool.submit(LARGE[kind], other, rows).result(60)
            pool.submit(other.close).result(60)
        client.session_info("s")

        async def one():
            async with qkvd.AsyncClient(daemon.target) as client:
                await client.append([qkvd.Item(session="s", k=rows, v=rows, position=0)])
                with daemon.stopped(), pytest.raises(qkvd.DeadlineExceeded, match=r"was not answered within 0\.2 s"):
                    await asyncio.wait_for(LARGE[kind](client, rows), 60)

        asyncio.run(one())


def test_libqkv_and_grpcio_have_one_deadline(client, session, rows, monkeypatch):
    """Where the one has failed, the other has the rest of the time."""
    k, v = rows(3)
    session.append(0, k, v)
    given = []

    def fails(*_):
        time.sleep(0.5)

    def call(_, timeout):
        given.append(timeout)
        return kv_cache_pb2.AppendResponse(tokens=3)

    def fetch_rows(*_, timeout, **__):
        given.append(timeout)
        return iter(())

    monkeypatch.setattr(client._native, "usable", lambda: True)
    monkeypatch.setattr(client._native, "append", fails)
    monkeypatch.setattr(session, "_fetch_native", fails)
    monkeypatch.setattr(client, "_call", call)
    monkeypatch.setattr(client, "fetch_rows", fetch_rows)
    assert session.append(0, k, v, timeout=10) == 3
    session.fetch(0, timeout=10)
    assert len(given) == 2 and max(given) <= 9.5
    monkeypatch.undo()


@pytest.mark.parametrize("call", ["append", "attend", "fetch"])
def test_daemon_that_comes_back(tmp_path, rows, queries, call):
    """A call that meets nobody waits for the daemon's return; sessions on the SSD are there again."""
    with Daemon("--data-dir", str(tmp_path)) as daemon, qkvd.Client(daemon.target, retry_for=60) as client:
        client.register_model(
            qkvd.Model(name="m", layers=1, kv_heads=KV_HEADS, q_heads=4, key_dim=DIM, value_dim=DIM, dtype="fp32")
        )
        k, v = rows(128)
        session = client.open("s", model="m", durability="sync", policy=qkvd.Policy(recent_window=0))
        session.append(0, k, v)
        q = queries(2)
        calls = {
            "append": lambda: session.append(0, k, v, position=0) == 0,  # known by their codes
            "attend": lambda: session.attend(0, q)[0].any(),
            "fetch": lambda: session.fetch(0)[0].shape == k.shape,
        }
        daemon.kill()
        with futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(calls[call])
            time.sleep(0.3)
            assert not waiting.done()
            daemon.start()
            assert waiting.result()
        session.close()


def test_decode_stream_of_a_daemon_that_went(rows, queries):
    with Daemon() as daemon, qkvd.Client(daemon.target, retry_for=0) as client:
        client.register_model(qkvd.Model(name="m", layers=1, kv_heads=KV_HEADS, q_heads=4, key_dim=DIM, value_dim=DIM))
        client.open("s", model="m").append(0, *rows(3))
        item = qkvd.Item(session="s", q=queries(1))
        with client.decode() as stream:
            stream.attend([item])
            daemon.kill()
            with pytest.raises(qkvd.Unavailable):
                stream.attend([item])
            with pytest.raises(qkvd.Unavailable):
                stream.attend([item])


def test_threads(client, model, name, rows, queries):
    """One client, many threads, each with sessions of its own; and one session that all append to."""
    k, v = rows(64)
    q = queries(1)
    with client.open(name, model=model.name) as shared:

        def work(index):
            with client.open(f"{name}-{index}", model=model.name) as session:
                for i in range(64):
                    session.append(0, k[i : i + 1], v[i : i + 1])
                    shared.append(1, k[:1], v[:1])
                assert np.array_equal(session.fetch(0)[0], k)
                return session.attend(0, q)[0]

        with futures.ThreadPoolExecutor(8) as pool:
            outs = list(pool.map(work, range(8)))
        assert all(np.array_equal(out, outs[0]) for out in outs)
        assert shared.lengths[1] == 8 * 64 == client.session_info(name).lengths[1]


# ---- TLS and tokens, and answers that cannot be read: of a small server of gRPC's ----


@pytest.fixture
def certificate(tmp_path):
    if not shutil.which("openssl"):
        pytest.skip("there is no openssl")
    paths = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=kv.example -addext subjectAltName=DNS:kv.example"
    subprocess.run([*command.split(), "-keyout", paths[0], "-out", paths[1]], check=True, capture_output=True)
    return paths


class Stranger(grpc.GenericRpcHandler):
    """Answers GetStatus, and lists with a page without end; keeps the metadata of calls and refuses those without the
    right token."""

    def __init__(self):
        self.seen = []

    def service(self, details):
        self.seen.append(dict(details.invocation_metadata))
        if self.seen[-1].get("authorization") not in (None, "Bearer secret"):
            return grpc.unary_unary_rpc_method_handler(
                lambda request, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such token")
            )
        answers = {
            "GetStatus": admin_pb2.GetStatusResponse(version="stranger"),
            "ListSessions": kv_cache_pb2.ListSessionsResponse(next_page_token="again"),
            "ListObjects": objects_pb2.ListObjectsResponse(next_page_token="again"),
        }
        message = answers.get(details.method.rpartition("/")[2])
        answer = message.SerializeToString() if message is not None else b"\xff\xff\xff"
        return grpc.unary_unary_rpc_method_handler(lambda request, context: answer)


@pytest.fixture
def serve():
    servers = []

    def start(credentials=None):
        server = grpc.server(futures.ThreadPoolExecutor(2))
        handler = Stranger()
        server.add_generic_rpc_handlers((handler,))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            target = f"127.0.0.1:{probe.getsockname()[1]}"
        if credentials is None:
            server.add_insecure_port(target)
        else:
            server.add_secure_port(target, credentials)
        server.start()
        servers.append(server)
        return target, handler

    yield start
    for server in servers:
        server.stop(None)


def test_tls(serve, certificate):
    key, chain = certificate
    target, _ = serve(grpc.ssl_server_credentials([(key.read_bytes(), chain.read_bytes())]))
    with qkvd.Client(target, tls=qkvd.Tls(ca=chain, server_name="kv.example"), token="secret") as client:
        assert client.status().version == "stranger"
    for tls in (None, True, qkvd.Tls(ca=chain)):  # in plain text; not signed by the system's; of another name
        with qkvd.Client(target, tls=tls, retry_for=0) as client, pytest.raises(qkvd.Unavailable):
            client.status()
    with pytest.raises(qkvd.InvalidArgument, match="together"):
        qkvd.Client(target, tls=qkvd.Tls(certificate=chain))


def test_token(serve):
    target, handler = serve()
    with qkvd.Client(target, token="secret") as client:
        client.status()
    assert handler.seen[-1]["authorization"] == "Bearer secret"
    with qkvd.Client(target, token="other") as client, pytest.raises(qkvd.Unauthenticated, match="no such token"):
        client.status()
    with qkvd.Client(target) as client:
        client.status()
    assert "authorization" not in handler.seen[-1]


def test_answers_that_cannot_be_read(serve):
    target, _ = serve()
    with qkvd.Client(target) as client:
        with pytest.raises(qkvd.Internal, match="cannot be read"):
            client.session_info("x")
        with pytest.raises(qkvd.Internal, match="cannot be read"):
            client.attend([qkvd.Item(session="x", q=np.zeros((1, 4, DIM), np.float32))])
        with pytest.raises(qkvd.Internal, match="cannot be read"):
            client.call("/qkv.v1.KvCache/Pin", kv_cache_pb2.PinRequest(), kv_cache_pb2.PinResponse)


def test_a_list_without_end(serve):
    """The same page token again and again."""
    target, _ = serve()

    async def lists():
        async with qkvd.AsyncClient(target) as client:
            for one in (client.sessions, client.objects):
                with pytest.raises(qkvd.Internal, match="page token 'again' again"):
                    assert [item async for item in one()] == []

    with qkvd.Client(target) as client:
        for one in (client.sessions, client.objects):
            with pytest.raises(qkvd.Internal, match="page token 'again' again"):
                assert list(one()) == []
    asyncio.run(lists())
