"""AsyncClient against a real daemon: the same calls, awaited."""

import asyncio
import contextlib
import gc
import sys
import threading
import time
from concurrent import futures

import numpy as np
import pytest
from conftest import DIM, FLOATS, KV_HEADS, Q_HEADS, attention
from daemon import PATIENCE, Daemon, wait_for
from test_fork import in_child, new_grpc

import qkvd
from qkvd import place
from qkvd.aio import AsyncDecodeStream
from qkvd.locks import calls_under_way


@pytest.fixture
def run(daemon):
    """run(work) runs the coroutine function with a client of its own."""

    def start(work, **options):
        async def main():
            async with qkvd.AsyncClient(daemon.target, **options) as client:
                return await work(client)

        return asyncio.run(main())

    return start


def test_append_attend_fetch(run, model, name, random, rows, queries):
    k, v = rows(3000)
    q = queries(3)

    async def work(client):
        async with await client.open(name, model=model.name, tokens=range(3000)) as session:
            assert await session.append(0, k[:2000], v[:2000]) == 2000
            out, lse = await session.attend(0, q[:1], k=k[2000:2001], v=v[2000:2001], options=FLOATS)
            assert await session.append(0, k[2001:], v[2001:]) == 999
            out, lse = await session.attend(0, q, options=FLOATS)
            expected = attention(q, k, v, 2997)
            np.testing.assert_allclose(out, expected[0], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(lse, expected[1], rtol=1e-5)
            back = await session.fetch(0)
            assert np.array_equal(back[0], k) and np.array_equal(back[1], v)
            await session.truncate(10)
            assert session.lengths == (10, 0)
            assert [len(piece.k) async for piece in client.fetch_rows(name, [0], chunk_tokens=6)] == [6, 4]
            other = await client.session(name)
            assert other.lengths == (10, 0)
            await other.pin()
            assert (await other.info()).pinned
            await other.unpin()
            await other.touch(ttl=50)
            assert name in [info.session async for info in client.sessions(name)]
            with pytest.raises(qkvd.AlreadyExists):
                await client.open(name, model=model.name)
            fork = await session.fork(f"{name}-fork")
            assert fork.lengths == (10, 0)
            await fork.close()
            assert [one.tokens for one in await client.has_sessions([name, fork.name])] == [0, 0]
            async for message in client.watch(model=model.name):
                assert message.reset and message.complete
                break
            await client.put(f"{name}-put", [rows(10)] * 2, model=model.name)
            assert (await client.close_session(f"{name}-put")) > 0
            assert await client.match(model.name, range(300)) == qkvd.Match("", 0, 0, 0, 0)
        with pytest.raises(qkvd.NotFound):
            await client.session(name)

    run(work)


def test_many_at_once(run, model, name, rows, queries):
    k, v = rows(16)
    q = queries(16)

    async def work(client):
        sessions = await asyncio.gather(*(client.open(f"{name}-{i}", model=model.name) for i in range(20)))
        await asyncio.gather(*(session.append(0, k[:8], v[:8]) for session in sessions))
        # Without a position, appends to one layer take turns.
        await asyncio.gather(*(sessions[0].append(1, k[:1], v[:1]) for _ in range(20)))
        assert sessions[0].lengths == (8, 20)
        outs = await asyncio.gather(*(session.attend(0, q[:8], 0) for session in sessions))
        assert all(np.array_equal(out, outs[0][0]) for out, _ in outs)
        batch = [qkvd.Item(session=session.name, position=8, k=k[8:], v=v[8:], q=q[8:]) for session in sessions]
        results = await client.attend(batch)
        assert [result.length for result in results] == [16] * 20
        assert await client.append(batch[:0]) == 0
        await asyncio.gather(*(session.close() for session in sessions))

    run(work)


def test_decode_stream(run, model, name, rows, queries):
    k, v = rows(10)
    q = queries(10)

    async def work(client):
        async with await client.open(name, model=model.name), client.decode() as stream:
            for i in range(10):
                item = qkvd.Item(session=name, position=i, k=k[i : i + 1], v=v[i : i + 1], q=q[i : i + 1], options=FLOATS)
                (result,) = await stream.attend([item])
            np.testing.assert_allclose(result.out, attention(q[9:], k, v, 9)[0], rtol=1e-4, atol=1e-5)
            (failed,) = await stream.attend([qkvd.Item(session="nobody", q=q[:1])])
            assert isinstance(failed.error, qkvd.NotFound)
            for _ in range(2):
                with pytest.raises(qkvd.InvalidArgument):
                    await stream.attend([])
        with pytest.raises(qkvd.InvalidArgument):
            await stream.attend([item])

    run(work)


def test_deadlines_and_ends(run, daemon, model, session):
    async def work(client):
        with daemon.stopped():
            with pytest.raises(qkvd.DeadlineExceeded, match=r"GetStatus was not answered within 0.2 s"):
                await client.status(timeout=0.2)
            async with client.decode() as stream:
                item = qkvd.Item(session=session.name, q=np.zeros((1, Q_HEADS, DIM), np.float32))
                for _ in range(2):
                    with pytest.raises(qkvd.DeadlineExceeded, match=r"Decode was not answered within 0.2 s"):
                        await stream.attend([item], timeout=0.2)
        assert (await client.metrics())["qkvd_append_tokens_total"] >= 0
        assert model.name in [known.model.name for known in await client.models()]
        assert (await client.model(model.name)).model.kv_heads == KV_HEADS
        assert (await client.register_model(model)).model.name == model.name
        with pytest.raises(qkvd.NotFound):
            await client.calibration(model.name)
        assert await client.attention_stats(session.name, buckets=1)
        await client.close()
        with pytest.raises(qkvd.FailedPrecondition, match="closed"):
            await client.status()

    run(work)


def test_nobody_answers():
    async def main():
        async with qkvd.AsyncClient("unix:/nobody/here", retry_for=0.2) as client:
            with pytest.raises(qkvd.Unavailable):
                await client.status()
            with pytest.raises(qkvd.Unavailable):
                await client.decode().attend([qkvd.Item(session="x", q=np.zeros((1, 4, DIM), np.float32))])

    asyncio.run(main())


def test_another_loop(daemon):
    client = qkvd.AsyncClient(daemon.target)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(client.status())
    with pytest.raises(qkvd.FailedPrecondition, match="another event loop"):
        asyncio.run(client.status())
    loop.run_until_complete(client.close())
    loop.close()


def test_a_watch_of_a_daemon_that_says_nothing(run, daemon, monkeypatch):
    monkeypatch.setattr("qkvd.calls.WATCH_PATIENCE", 0.5)

    async def begun(client):
        """A watch whose first message has come in time."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            watch = client.watch()
            with contextlib.suppress(qkvd.DeadlineExceeded):
                assert (await anext(watch)).reset
                return watch
        raise AssertionError("no message comes")

    async def work(client):
        watch = await begun(client)
        with daemon.stopped(), pytest.raises(qkvd.DeadlineExceeded, match=r"Watch was not answered within 0.5 s"):
            async for _ in watch:
                pass

    run(work, timeout=0.2)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a task does not tell whether it is cancelled")
@contextlib.contextmanager
def left_open(client):
    """Closing the client does not close its channel."""

    async def close(_):
        pass

    channel = client._channel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "close", close)
        yield


@pytest.mark.parametrize("found", [True, False])
def test_a_client_is_closed_under_a_call(run, daemon, monkeypatch, found):
    """Who waits for the call is not cancelled with it. `found`: by gRPC, as the channel is closed."""

    item = qkvd.Item(session="none", q=np.zeros((1, Q_HEADS, DIM), np.float32))

    async def work(client):
        await client.status()
        begun, wait, exchange = [], client._answer, AsyncDecodeStream._exchange

        def waits(*arguments):
            begun.append("call")
            return wait(*arguments)

        def exchanges(*arguments):
            begun.append("step")
            return exchange(*arguments)

        monkeypatch.setattr(client, "_answer", waits)
        monkeypatch.setattr(AsyncDecodeStream, "_exchange", exchanges)
        with daemon.stopped():
            waiting = asyncio.create_task(client.session_info("none"))
            step = asyncio.create_task(client.decode().attend([item]))
            put = asyncio.create_task(client.put_object("o", b"x"))
            while len(begun) < 3:
                await asyncio.sleep(0)
            with contextlib.nullcontext() if found else left_open(client):
                await client.close()
            for task in (waiting, step, put):
                with pytest.raises(qkvd.Cancelled, match="the client was closed"):
                    await task

    run(work)


def test_messages_that_cannot_be_made(run, model, name, rows):
    """Who waits for the call has the error, and is not cancelled; where nothing came of it, nothing is held."""

    def broken():
        yield rows(10)
        raise KeyError("mine")

    async def work(client):
        k, v = rows(10)
        with pytest.raises(qkvd.InvalidArgument, match="layer is -1"):
            await client.append([qkvd.Item(session=name, k=k, v=v, layer=-1)])
        with pytest.raises(qkvd.InvalidArgument, match="k is of int64"):
            await client.put(name, [(k.astype(int), v)] * 2, model=model.name)
        with pytest.raises(qkvd.Unknown) as raised:
            await client.put(name, broken(), model=model.name)
        assert isinstance(raised.value.__cause__, KeyError)
        with pytest.raises(qkvd.InvalidArgument, match="object p"):
            await client.put_objects([(f"{name}-o", b"x"), ("p", 3)])
        assert [bool(one) for one in await client.has_sessions([name])] == [False]

    run(work)


def test_what_is_refused_in_the_middle(run, model, name, rows):
    """The daemon's word is heard, however many messages were still to come."""
    k, v = rows(60_000)

    async def work(client):
        for _ in range(10):
            with pytest.raises(qkvd.NotFound, match="no session none"):
                await client.append([qkvd.Item(session="none", k=k, v=v)])
            with pytest.raises(qkvd.NotFound, match="no model none"):
                await client.put(name, [(k, v)] * 2, model="none")

    run(work)


def test_a_daemon_that_dies_between_two_steps(queries):
    item = qkvd.Item(session="none", q=queries(1))

    async def work():
        async with qkvd.AsyncClient(daemon.target) as client, client.decode() as stream:
            await stream.attend([item])
            daemon.kill()
            await asyncio.sleep(0.2)
            for _ in range(2):
                with pytest.raises(qkvd.Unavailable):
                    await stream.attend([item])

    with Daemon() as daemon:
        asyncio.run(work())


@new_grpc
def test_a_fork_waits_for_calls_of_a_task(daemon, client, session, rows, patient):
    """And they for it; else the child crashes, and calls of the parent do not end."""
    k, v = rows(20_000)
    session.append(0, k, v)
    stop, rounds = threading.Event(), []

    async def work():
        async with qkvd.AsyncClient(daemon.target) as one:
            same = await one.session(session.name)
            while not stop.is_set():
                assert np.array_equal((await same.fetch(0))[0], k)
                rounds.append(await one.models())

    with futures.ThreadPoolExecutor(1) as pool:
        working = pool.submit(asyncio.run, work())
        try:
            for _ in range(10):
                before = len(rounds)
                wait_for(lambda before=before: len(rounds) > before or working.done(), "the task does not go on")
                assert in_child(client.models) == 0
        finally:
            stop.set()
        working.result()
    assert calls_under_way._streams == 0 and not calls_under_way._readers


def test_calls_of_tasks_are_counted(run, daemon, session):
    """A child is told of those of the thread that forks; which of them waits for nothing."""
    item = qkvd.Item(session=session.name, q=np.zeros((1, Q_HEADS, DIM), np.float32))

    def counted():
        return len(calls_under_way._readers), calls_under_way._streams

    async def work(client):
        assert counted() == (0, 0)
        with daemon.stopped():
            tasks = []
            for begin, expected in (
                (lambda: client.session_info(session.name), (1, 1)),
                (lambda: anext(client.fetch_rows(session.name)), (2, 2)),
                (lambda: client.put_object("o", b"x"), (3, 4)),
                (lambda: anext(client.watch()), (3, 5)),
                (lambda: client.decode().attend([item]), (3, 6)),
            ):
                tasks.append(asyncio.ensure_future(begin()))
                while counted() != expected:
                    await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            del tasks, task
        while counted() != (0, 0):
            await asyncio.sleep(0.01)
            gc.collect()
        # While another thread is about to fork, calls wait.
        calls_under_way._forking.add(-1)
        waiting = asyncio.create_task(client.models())
        await asyncio.sleep(0.05)
        assert counted() == (0, 0) and not waiting.done()
        calls_under_way._forking.clear()
        await waiting

    try:
        run(work)
    finally:
        calls_under_way._forking.clear()


def test_streams_end_with_their_client(run, daemon, session, rows):
    """Also those that nobody reads at the moment: a child of fork() is not told of them."""
    session.append(0, *rows(10))
    item = qkvd.Item(session=session.name, q=np.zeros((1, Q_HEADS, DIM), np.float32))

    async def work(client):
        idle = [client.watch(), client.fetch_rows(session.name, [0], chunk_tokens=1)]
        for one in idle:
            await anext(one)
        stream = client.decode()
        await stream.attend([item])
        assert (len(calls_under_way._readers), calls_under_way._streams) == (1, 3)
        await client.close()
        assert (len(calls_under_way._readers), calls_under_way._streams) == (0, 0)
        for one in idle:
            with pytest.raises(qkvd.Cancelled, match="the client was closed"):
                await anext(one)
        with pytest.raises(qkvd.Cancelled, match="the client was closed"):
            await stream.attend([item])
        assert (len(calls_under_way._readers), calls_under_way._streams) == (0, 0)

    run(work)


@pytest.mark.parametrize("several", [False, True])
def test_streams_end_where_they_are_left(daemon, session, rows, several):
    """At once, and not when the collector of garbage finds them: the next statement may be a fork."""
    k, v = rows(10)
    session.append(0, k, v)
    client = qkvd.AsyncClient(
        f"{daemon.target},unix:/nobody" if several else daemon.target, placement=placed(daemon.target)
    )

    async def work():
        async with client:
            for stream in (client.watch(), client.fetch_rows(session.name, [0], chunk_tokens=1)):
                await anext(stream)
                await stream.aclose()
                assert (len(calls_under_way._readers), calls_under_way._streams) == (0, 0)
            small = await client.session(session.name)
            with pytest.raises(qkvd.InvalidArgument, match="room for 2 tokens"):
                await small.fetch(0, out=(np.empty_like(k[:2]), np.empty_like(v[:2])))
            assert (len(calls_under_way._readers), calls_under_way._streams) == (0, 0)

    asyncio.run(work())


def placed(target):
    """A placement at this daemon of two."""
    weights = {name: place.weight(place.hash_of(target), place.hash_of(name)) for name in map(str, range(100))}
    other = {name: place.weight(place.hash_of("unix:/nobody"), place.hash_of(name)) for name in weights}
    return next(name for name in weights if weights[name] > other[name])


def test_a_watch_whose_loop_is_closed(daemon):
    """Nobody can close it any more: it counts as long as somebody has it."""

    async def first(watch):
        return await anext(watch)

    client, loop = qkvd.AsyncClient(daemon.target), asyncio.new_event_loop()
    watch = client.watch()
    assert loop.run_until_complete(first(watch)).reset
    assert calls_under_way._streams == 1
    loop.close()
    del watch
    wait_for(lambda: gc.collect() >= 0 and calls_under_way._streams == 0, "the watch counts")


def test_a_task_is_cancelled_under_a_call(run, daemon):
    async def work(client):
        with daemon.stopped():
            waiting = asyncio.create_task(client.session_info("none"))
            await asyncio.sleep(0.2)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    run(work)
