"""fork(): it waits for calls, and a child has connections of its own, or is told."""

import gc
import os
import signal
import sys
import threading
import time
from concurrent import futures
from functools import partial

import numpy as np
import pytest
from conftest import DIM, Q_HEADS
from daemon import PATIENCE, wait_for
from test_connection import functions_of

import qkvd
from qkvd import connection, locks
from qkvd.locks import calls_under_way


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
