"""Connections: deadlines, repeats, a daemon that goes and comes back, threads, fork(), TLS and tokens."""

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
from functools import partial
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from conftest import DIM, KV_HEADS, Q_HEADS
from daemon import PATIENCE, Daemon, wait_for

import qkvd
from qkvd import connection, locks, waits
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


def in_child(work):
    """Runs `work` in a child process made by fork(); gives its exit status, or None where it hangs."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:
            print("child:", repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


new_grpc = pytest.mark.skipif(not connection.SERVES_CHILDREN, reason="grpcio before 1.80 does not survive fork()")


def test_fork_is_refused(client, session, monkeypatch):
    """By an early grpcio; a client of the child's own is its own risk."""
    monkeypatch.setattr(connection, "SERVES_CHILDREN", False)

    def child():
        with pytest.raises(qkvd.FailedPrecondition, match=r"needs grpcio 1.80 or later.*spawn"):
            session.info()

    assert in_child(child) == 0
    assert session.info().lengths == [0, 0]


@new_grpc
def test_fork(client, session, rows, patient):
    """The child has a connection of its own; the parent's goes on."""
    k, v = rows(20)
    session.append(0, k[:10], v[:10])
    for _ in range(3):
        assert in_child(lambda: session.append(1, k, v, position=0)) == 0
        assert in_child(lambda: client.close()) == 0
        assert in_child(lambda: session.fetch(0)) == 0
    session.append(0, k[10:], v[10:])
    assert np.array_equal(session.fetch(0)[0], k)
    assert session.info().lengths == [20, 20]


@new_grpc
def test_fork_while_threads_are_at_work(client, model, name, rows, patient):
    """Locks that other threads hold are open in the child, and the fork waits for their calls."""
    k, v = rows(1)
    with client.open(name, model=model.name) as session:
        stop = threading.Event()

        def work(layer):
            while not stop.is_set():
                session.append(layer, k, v)

        session.append(0, k, v)
        with futures.ThreadPoolExecutor(2) as pool:
            workers = [pool.submit(work, 1) for _ in range(2)]
            try:
                for _ in range(20):
                    session._turns[0]._lock.acquire()  # as another thread would
                    try:
                        assert in_child(lambda: session.append(0, k, v)) == 0
                    finally:
                        session._turns[0]._lock.release()
                    session.truncate(1, layers=[0])
            finally:
                stop.set()
            for worker in workers:
                worker.result()


@new_grpc
def test_fork_with_a_stream(client, session, rows, queries, patient):
    """gRPC is not whole in the child: calls are refused, and the parent's stream goes on."""
    k, v = rows(1)
    q = queries(1)
    session.append(0, k, v)

    def child(stream):
        with pytest.raises(qkvd.FailedPrecondition, match="forked while a call or a stream was open"):
            session.append(0, k, v)
        with pytest.raises(qkvd.FailedPrecondition, match="before fork"):
            stream.attend([qkvd.Item(session=session.name, q=q)])
        stream.close()

    with client.decode() as stream:
        assert in_child(lambda: session.info()) == 0  # nothing has been asked of it
        stream.attend([qkvd.Item(session=session.name, q=q)])
        for _ in range(3):
            assert in_child(lambda: child(stream)) == 0
        assert stream.attend([qkvd.Item(session=session.name, q=q)])[0].error is None
    assert in_child(lambda: session.info()) == 0


@new_grpc
def test_a_fork_waits_for_fetches_of_other_threads(client, session, rows, patient):
    """Else the child's gRPC could read what comes to the parent."""
    k, v = rows(100_000)
    session.append(0, k, v)
    with futures.ThreadPoolExecutor(1) as pool:
        for _ in range(5):
            fetched = pool.submit(session.fetch, 0)
            time.sleep(0.002)
            assert in_child(session.info) == 0
            assert np.array_equal(fetched.result()[0], k)
    assert calls_under_way._streams == 0


class Answers:
    """Of a call, without gRPC, which may crash in a child whatever is done."""

    def __init__(self):
        self.cancelled = False
        self.callback = lambda _: None

    def __iter__(self):
        return self

    def __next__(self):
        return b""

    def add_done_callback(self, callback):
        self.callback = callback

    def cancel(self):
        self.cancelled = True
        self.callback(self)


@pytest.mark.parametrize("of", [lambda client: client._stream("Fetch", b"", 10), lambda client: client.watch()])
def test_a_child_leaves_a_stream_of_answers_alone(client, monkeypatch, of):
    """To cancel it there would break the parent's connection."""
    answers = Answers()
    monkeypatch.setattr(client, "_answers", lambda *_: answers)
    held = [of(client)]
    next(held[0])

    def child(read_on):
        if read_on:
            with pytest.raises(qkvd.FailedPrecondition, match="before fork"):
                next(held[0])
        held.clear()
        assert not answers.cancelled

    for read_on in False, True:
        assert in_child(partial(child, read_on)) == 0
    held.clear()
    assert answers.cancelled and calls_under_way._streams == 0 and not calls_under_way._readers


def test_a_child_leaves_garbage_of_its_parent_alone(client):
    """In which there may be a channel, whose end would be the parent's, or wait for a thread of the parent's."""
    client.models()
    ended = []

    class Garbage:
        def __init__(self):
            self.own = self

        def __del__(self):
            ended.append(os.getpid())

    def child():
        gc.collect()
        assert not ended

    gc.disable()
    try:
        Garbage()
        assert in_child(child) == 0
    finally:
        gc.enable()
    gc.collect()
    assert ended == [os.getpid()]


@pytest.mark.parametrize(
    "begin",
    [
        lambda client: next(client._stream("Fetch", b"", 10)),
        lambda client: next(client.watch()),
        lambda client: client.decode().attend([qkvd.Item(session="s", q=np.zeros((1, Q_HEADS, DIM), np.float32))]),
    ],
)
def test_a_stream_is_counted_before_it_begins(client, monkeypatch, begin):
    """Else a fork in between would not know of it."""

    def answers(*_):
        assert calls_under_way._running > 0
        raise OverflowError

    monkeypatch.setattr(client, "_answers", answers)
    with pytest.raises(OverflowError):
        begin(client)
    assert calls_under_way._streams == 0 and calls_under_way._running == 0


def inside_grpc(wait):
    """A thread with a frame of gRPC's, until `wait` returns."""
    space = {"__name__": "grpc._channel", "wait": wait}
    exec("def channel_spin():\n    wait()", space)
    thread = threading.Thread(target=space["channel_spin"])
    thread.start()
    wait_for(lambda: "channel_spin" in functions_of(thread.ident), "the thread does not begin")
    return thread


@new_grpc
def test_a_fork_waits_for_grpcs_threads(client, patient):
    """And for no others, whatever they do."""
    client.models()
    over, stop = threading.Event(), threading.Event()

    def wait():
        wait_for(lambda: calls_under_way._forking, "nobody forks")
        time.sleep(0.1)  # in which the fork goes on, if it does not wait
        over.set()

    def child():
        assert over.is_set() and client.models() is not None

    computing = threading.Thread(target=lambda: all(iter(lambda: not stop.is_set(), False)))
    computing.start()
    thread = inside_grpc(wait)
    try:
        assert in_child(child) == 0
    finally:
        stop.set()
        thread.join()
        computing.join()


@new_grpc
def test_a_fork_waits_once_for_a_thread_that_stays_inside_grpc(client, monkeypatch):
    """Such as a server's of the same program."""
    client.models()
    over = threading.Event()
    thread = inside_grpc(over.wait)
    try:
        assert in_child(client.models) == 0
        monkeypatch.setattr(locks, "SETTLES", PATIENCE)
        begin = time.monotonic()
        assert in_child(client.models) == 0
        assert time.monotonic() - begin < PATIENCE / 2
    finally:
        over.set()
        thread.join()


def test_the_thread_that_forks_may_call_meanwhile(client, monkeypatch):
    """The collector of garbage may close a session there."""
    client.models()
    looked = []

    def look():
        if threading.get_ident() == forks.ident and not looked:
            looked.append(client.models())
        return set()

    monkeypatch.setattr(locks, "_inside_grpc", look)
    outcome = []
    forks = threading.Thread(target=lambda: outcome.append(in_child(lambda: None)), daemon=True)
    forks.start()
    forks.join(PATIENCE)
    assert outcome == [0] and looked


def test_calls_tell_of_their_end_while_the_process_forks():
    """gRPC may wait for the thread that does."""
    began = calls_under_way.read_begins(Answers())
    calls_under_way.before_fork()
    try:
        thread = threading.Thread(target=calls_under_way._has_ended, args=(began,))
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    finally:
        calls_under_way.after_in_parent()
        calls_under_way.read_ends(began)
    assert calls_under_way._streams == 0 and not calls_under_way._readers


@new_grpc
def test_fork_in_the_middle_of_a_put_and_of_a_watch(client, session, model, name, rows, monkeypatch):
    """As with a decode stream: the child is told, and the parent's call goes on."""
    monkeypatch.setattr(locks, "SETTLES", PATIENCE)

    def child():
        with pytest.raises(qkvd.FailedPrecondition, match="forked while a call or a stream was open"):
            session.info()

    go_on = threading.Event()

    def pairs():
        yield rows(1)
        go_on.wait()
        yield rows(1)

    with futures.ThreadPoolExecutor(1) as pool:
        put = pool.submit(client.put, name + "-put", pairs(), model=model.name)
        try:
            wait_for(lambda: calls_under_way._running > 0, "the put does not begin")
            assert in_child(child) == 0
        finally:
            go_on.set()
        put.result()
    assert client.session_info(name + "-put").lengths == [1, 1]
    client.close_session(name + "-put")
    watch = client.watch()
    assert next(watch).reset
    assert in_child(child) == 0
    watch.close()
    assert in_child(lambda: session.info()) == 0


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
