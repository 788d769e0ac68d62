"""Several daemons behind one client: who owns what, batches that go to all of them, one that is killed and returns."""

import asyncio
import contextlib
import gc
import os
import pathlib
import signal
import socket
import threading
import time
from concurrent import futures

import grpc
import numpy as np
import pytest
from conftest import DIM, KV_HEADS, Q_HEADS
from daemon import PATIENCE, Daemon, wait_for
from test_fork import in_child, new_grpc

import qkvd
from qkvd import native, place, several_async, several_sync
from qkvd.calls import register_model
from qkvd.several import CHECK, SERVING

VALUES = pathlib.Path(__file__).parents[3] / "tests/data/places.txt"
SESSIONS = [f"session/{i}" for i in range(45)]
MODEL = qkvd.Model(
    name="m", layers=1, kv_heads=KV_HEADS, q_heads=Q_HEADS, key_dim=DIM, value_dim=DIM, dtype="fp32", policy=qkvd.EXACT
)
IDS = list(range(100, 164))


@pytest.mark.parametrize("function", [place.xxh3_64, place._hash])
def test_weights_are_the_same_everywhere(function):
    """The same values as in C (tests/client/c/place_test.c)."""
    targets, keys = [], 0
    for line in VALUES.read_text().splitlines():
        kind, *words = line.split()
        if kind == "target":
            assert f"{function(words[0].encode()):016x}" == words[1]
            targets.append(int(words[1], 16))
        elif kind == "key":
            hashed = function(words[0].encode())
            assert f"{hashed:016x}" == words[1]
            weights = [place.weight(target, hashed) for target in targets]
            assert weights.index(max(weights)) == int(words[2])
            keys += 1
    assert len(targets) == 3 and keys > 10


def test_bad_targets():
    for target in ("a:1,", ",", "a:1,a:1", "a:1,b", "a:1," + "b" * 128 + ":1"):
        with pytest.raises(qkvd.InvalidArgument, match="target"):
            qkvd.Client(target)
    with pytest.raises(qkvd.InvalidArgument, match="placement"):
        qkvd.Client("a:1,b:1", placement="no label")
    with (
        qkvd.Client("unix:/nobody/1,unix:/nobody/2", retry_for=0.3) as client,
        pytest.raises(qkvd.Unavailable, match="2 daemons"),
    ):
        client.session_info("s")


def test_threads_whose_calls_wait_for_one_do_not_keep_the_others():
    """Each of them has the items of the daemon that answers."""
    threads = 12
    with Daemon() as mute, Daemon() as well, futures.ThreadPoolExecutor(threads) as pool:
        with qkvd.Client(f"{mute.target},{well.target}", timeout=10) as client:
            client.register_model(MODEL)
            items = []
            for name in SESSIONS[:12]:
                client.open(name, model="m")
                items.append(qkvd.Item(session=name, q=np.zeros((1, Q_HEADS, DIM), np.float32)))
            held = {info.session for info in client.daemons[well.target].sessions()}
            assert 0 < len(held) < len(items)
            with mute.stopped():
                batches = [one.result() for one in [pool.submit(client.attend, items) for _ in range(threads)]]
        for results in batches:
            for item, result in zip(items, results, strict=True):
                assert isinstance(result.error, qkvd.DeadlineExceeded) == (item.session not in held)


def test_silent_daemons_take_the_time_of_one(monkeypatch):
    """Those that take connections and say nothing, before one that answers, are asked at the same time."""
    asked, all_asked = [], threading.Barrier(7)

    def healthy(client, seconds, *, ask=several_sync._healthy, **more):
        if not more:
            all_asked.wait(PATIENCE)
        return ask(client, seconds, **more)

    async def healthy_too(client, seconds, *, ask=several_async._healthy):
        asked.append(client)
        if asyncio.current_task().get_coro().__name__ == "serves":
            until = time.monotonic() + PATIENCE
            while len(asked) < 7:
                assert time.monotonic() < until
                await asyncio.sleep(0.01)
        return await ask(client, seconds)

    async def asynchronous(targets):
        async with qkvd.AsyncClient(targets) as client:
            return await client.models()

    monkeypatch.setattr(several_sync, "_healthy", healthy)
    monkeypatch.setattr(several_async, "_healthy", healthy_too)

    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(6)]
        daemon = stack.enter_context(Daemon())
        targets = ",".join([f"127.0.0.1:{one.getsockname()[1]}" for one in silent] + [daemon.target])
        client = stack.enter_context(qkvd.Client(targets))
        assert client.models() == []
        assert asyncio.run(asynchronous(targets)) == []


@pytest.fixture
def hung():
    """Two daemons, of which the first does not answer."""
    with Daemon() as mute, Daemon() as well, mute.stopped():
        yield mute, well


def test_a_daemon_that_hangs_keeps_nobody(hung, rows, monkeypatch):
    """It is asked in the background, and its sessions are the other's meanwhile, until it answers."""
    mute, well = hung
    k, v = rows(1)
    watches = [thread for thread in threading.enumerate() if thread.name == "qkvd-health"]
    asked = []

    def healthy(client, seconds, *, in_background=False, ask=several_sync._healthy):
        asked.append((client.target, in_background))
        return ask(client, seconds, in_background=in_background)

    monkeypatch.setattr(several_sync, "_healthy", healthy)
    with qkvd.Client(f"{mute.target},{well.target}") as client:
        client.register_model(MODEL)
        for name in SESSIONS[:12]:
            client.open(name, model="m")

        def work():
            client.append([qkvd.Item(session=name, k=k, v=v) for name in SESSIONS[:12]])
            client.match("m", IDS)
            return asked.count((mute.target, True)) >= 4

        wait_for(work, "it is not asked in the background")
        assert asked.count((mute.target, False)) == asked.count((well.target, False)) == 1
        os.kill(mute.process.pid, signal.SIGCONT)
        wait_for(lambda: not all(client.has_sessions(SESSIONS[:12])), "it is not found again")
        held = client.daemons[mute.target]
        assert [model.model.name for model in held.models()] == ["m"]
    wait_for(lambda: watches == [t for t in threading.enumerate() if t.name == "qkvd-health"], "a watch goes on")


def test_asyncio_does_not_wait_for_a_daemon_that_hangs(hung, rows, monkeypatch):
    mute, well = hung
    k, v = rows(1)
    asked = []

    async def healthy(client, seconds, *, ask=several_async._healthy):
        asked.append((client.target, asyncio.current_task().get_coro().__name__ == "_watch"))
        return await ask(client, seconds)

    monkeypatch.setattr(several_async, "_healthy", healthy)

    async def work():
        async with qkvd.AsyncClient(f"{mute.target},{well.target}") as client:
            await client.register_model(MODEL)
            for name in SESSIONS[:12]:
                await client.open(name, model="m")
            until = time.monotonic() + PATIENCE
            while asked.count((mute.target, True)) < 4:
                assert time.monotonic() < until
                await client.append([qkvd.Item(session=name, k=k, v=v) for name in SESSIONS[:12]])
                await client.match("m", IDS)
                await asyncio.sleep(0.01)
            assert asked.count((mute.target, False)) == asked.count((well.target, False)) == 1
            os.kill(mute.process.pid, signal.SIGCONT)
            until = time.monotonic() + PATIENCE
            while all(await client.has_sessions(SESSIONS[:12])):
                assert time.monotonic() < until
            assert [model.model.name for model in await client.daemons[mute.target].models()] == ["m"]

    asyncio.run(work())


def test_health_checks_take_no_more_than_the_call_has(hung, monkeypatch):
    """Those of connectors' lookups have a quarter of a second, of which a scheduler waits."""
    monkeypatch.setattr("qkvd.several.CHECK_SECONDS", PATIENCE)
    mute, well = hung
    targets = f"{mute.target},{well.target}"

    async def asynchronous(work):
        async with qkvd.AsyncClient(targets) as client:
            await work(client)

    for work in (
        lambda client: client.models(timeout=0.2),
        lambda client: client.has_sessions(SESSIONS[:12], timeout=0.2),
        lambda client: client.session_info(
            next(name for name in SESSIONS if owner_of(name, mute, well) is mute), timeout=0.2
        ),
    ):
        with qkvd.Client(targets) as client:
            begin = time.monotonic()
            with contextlib.suppress(qkvd.Error):
                work(client)
            assert time.monotonic() - begin < PATIENCE / 2
        begin = time.monotonic()
        with contextlib.suppress(qkvd.Error):
            asyncio.run(asynchronous(work))
        assert time.monotonic() - begin < PATIENCE / 2


def owner_of(name, *daemons):
    return max(daemons, key=lambda one: place.weight(place.hash_of(one.target), place.hash_of(name)))


@new_grpc
def test_a_client_that_nobody_has_watches_no_more(hung, patient):
    """Nor does one in a child of fork(), whose calls work."""
    mute, well = hung

    def watches():
        return [thread for thread in threading.enumerate() if thread.name == "qkvd-health"]

    wait_for(lambda: not watches(), "a watch goes on")
    client = qkvd.Client(f"{mute.target},{well.target}")
    assert client.models() == []
    assert len(watches()) == 1
    for _ in range(8):
        time.sleep(0.1)
        assert in_child(client.models) == 0
    del client
    gc.collect()
    wait_for(lambda: not watches(), "a watch goes on")


@pytest.mark.parametrize("listed", [lambda client: client.sessions(), lambda client: client.objects()])
def test_a_list_finds_out_that_a_daemon_has_gone(listed):
    """Else no list would ever come again."""

    async def asynchronous(targets):
        async with qkvd.AsyncClient(targets) as client:
            await client.models()
            gone.kill()
            with pytest.raises(qkvd.Unavailable):
                assert [one async for one in listed(client)]
            assert [one async for one in listed(client)] == []

    with Daemon() as gone, Daemon() as well:
        targets = f"{gone.target},{well.target}"
        with qkvd.Client(targets) as client:
            client.models()
            gone.kill()
            with pytest.raises(qkvd.Unavailable):
                list(listed(client))
            assert list(listed(client)) == []
        gone.start()
        asyncio.run(asynchronous(targets))


class Slow(grpc.GenericRpcHandler):
    """A server that is healthy, and answers neither the registration of a model nor a lookup."""

    def __init__(self):
        self.asked, self.over = threading.Event(), threading.Event()
        self.gone = False

    def wait(self, request, context):
        self.asked.set()
        if self.gone:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        self.over.wait(PATIENCE)

    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(
            (lambda request, context: SERVING) if details.method == CHECK else self.wait
        )


@pytest.fixture
def slow():
    handler, server = Slow(), grpc.server(futures.ThreadPoolExecutor(16))
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    handler.target = f"127.0.0.1:{port}"
    yield handler
    handler.over.set()
    server.stop(None).wait()


def test_models_are_brought_within_the_call(slow):
    """A lookup does not wait for a daemon that is back, and takes no models yet."""

    async def asynchronous(call):
        async with qkvd.AsyncClient(targets, timeout=PATIENCE) as client:
            client._kept_models["m"] = call
            with contextlib.suppress(qkvd.DeadlineExceeded):
                await client.models(timeout=0.5)

    with Daemon() as well:
        targets = f"{slow.target},{well.target}"
        begin = time.monotonic()
        with qkvd.Client(targets, timeout=PATIENCE) as client:
            client._kept_models["m"] = register_model(MODEL)
            with contextlib.suppress(qkvd.DeadlineExceeded):
                client.models(timeout=0.5)
        asyncio.run(asynchronous(register_model(MODEL)))
        assert time.monotonic() - begin < PATIENCE / 2


def test_a_daemon_is_used_when_it_has_the_models(slow):
    """Not before: calls of other threads would not find them."""
    with qkvd.Client(f"{slow.target},unix:/nobody", retry_for=0) as client, futures.ThreadPoolExecutor(1) as pool:
        client._kept_models["m"] = register_model(MODEL)
        asking = pool.submit(client.models)
        assert slow.asked.wait(PATIENCE)
        assert client._daemons.all[0].suspect
        slow.over.set()
        with pytest.raises(qkvd.Error):
            asking.result()

    async def asynchronous():
        async with qkvd.AsyncClient(f"{slow.target},unix:/nobody", retry_for=0) as client:
            client._kept_models["m"] = register_model(MODEL)
            asking = asyncio.create_task(client.models())
            await asyncio.to_thread(slow.asked.wait, PATIENCE)
            assert client._daemons.all[0].suspect
            slow.over.set()
            with pytest.raises(qkvd.Error):
                await asking

    slow.asked.clear()
    slow.over.clear()
    asyncio.run(asynchronous())


def test_a_lookup_and_the_check_of_an_owner_have_one_deadline(slow, rows, monkeypatch):
    """A daemon that does not answer the lookup may own the session that another one has."""
    asked, slow.gone = [], True

    def healthy(client, seconds, **more):
        asked.append(seconds)
        return True

    async def healthy_too(client, seconds):
        return healthy(client, seconds)

    async def asynchronous(targets):
        async with qkvd.AsyncClient(targets) as client:
            await client.match("m", IDS, timeout=0.5)

    monkeypatch.setattr(several_sync, "_healthy", healthy)
    monkeypatch.setattr(several_async, "_healthy", healthy_too)
    with Daemon() as well, qkvd.Client(well.target) as one:
        one.register_model(MODEL)
        k, v = rows(64)
        name = next(name for name in SESSIONS if owner_of(name, slow, well) is slow)
        one.open(name, model="m", tokens=IDS).append(0, k, v)
        assert one.match("m", IDS).session == name
        targets = f"{slow.target},{well.target}"
        with qkvd.Client(targets) as client:
            client.match("m", IDS, timeout=0.5)
        asyncio.run(asynchronous(targets))
    assert len(asked) == 6 and max(asked) <= 0.5


def test_a_daemon_that_says_nothing_does_not_keep_the_answers_of_others(rows):
    """It has answered before: a lookup finds out, has the other's answer, and the next one goes without it."""

    def check(client, match):
        assert (match.session, match.tokens) == (name, 64)
        assert client._daemons.all[0].suspect

    async def asynchronous(targets):
        async with qkvd.AsyncClient(targets) as client:
            await client.models()
            with mute.stopped():
                check(client, await client.match("m", IDS, timeout=5))

    with Daemon() as mute, Daemon() as well:
        targets = f"{mute.target},{well.target}"
        name = next(name for name in SESSIONS if owner_of(name, mute, well) is well)
        k, v = rows(64)
        with qkvd.Client(targets) as client:
            client.register_model(MODEL)
            client.open(name, model="m", tokens=IDS).append(0, k, v)
            with mute.stopped():
                check(client, client.match("m", IDS, timeout=5))
        asyncio.run(asynchronous(targets))


def test_a_client_that_is_closed(targets_of_two, rows):
    """Also one whose batches have gone to several daemons at once."""
    with qkvd.Client(targets_of_two) as client:
        client.register_model(MODEL)
        names = SESSIONS[:12]
        assert not any(client.has_sessions(names))
    for call in (lambda: client.has_sessions(names), client.models, lambda: list(client.sessions())):
        with pytest.raises(qkvd.FailedPrecondition, match="the client is closed"):
            call()


def test_a_watch_ends_with_its_client(hung):
    mute, well = hung

    async def work():
        client = qkvd.AsyncClient(f"{mute.target},{well.target}")
        await client.models()
        (watch,) = [daemon.watch for daemon in client._daemons.all if daemon.watch is not None]
        for daemon in client._daemons.all:
            daemon.watch = None  # as one that begins while the client is being closed
        await client.close()
        await asyncio.wait_for(watch, PATIENCE)

    asyncio.run(work())


@pytest.fixture
def targets_of_two():
    with Daemon() as one, Daemon() as other:
        yield f"{one.target},{other.target}"


@pytest.fixture(scope="module")
def daemons():
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Daemon()) for _ in range(3)]


@pytest.fixture
def targets(daemons):
    return ",".join(daemon.target for daemon in daemons)


@pytest.fixture
def several(targets):
    with qkvd.Client(targets) as client:
        client.register_model(MODEL)
        yield client
        for info in client.sessions():
            client.close_session(info.session)


def fill(client, rows):
    k, v = rows(64)
    for name in SESSIONS:
        client.open(name, model="m")
    new = client.append([
        qkvd.Item(session=name, k=k + i, v=v + i, tokens=IDS if i == 5 else None) for i, name in enumerate(SESSIONS)
    ])  # fmt: skip
    assert new == 64 * len(SESSIONS)
    return k, v


def held(client):
    """The sessions of each daemon."""
    return {target: {info.session for info in one.sessions()} for target, one in client.daemons.items()}


def same(results, expected):
    return all(np.array_equal(one.out, other.out) for one, other in zip(results, expected, strict=True))


def test_batches_go_to_all_of_them(several, rows, queries):
    k, _ = fill(several, rows)
    shares = held(several)
    assert all(6 <= len(share) <= 25 for share in shares.values()) and sum(map(len, shares.values())) == len(SESSIONS)
    q = queries(1)
    batch = [qkvd.Item(session=name, position=63, q=q) for name in SESSIONS]
    results = several.attend(batch)
    alone = [next(one for target, one in several.daemons.items() if name in shares[target]) for name in SESSIONS]
    expected = [one.attend([item])[0] for one, item in zip(alone, batch, strict=True)]
    assert same(results, expected) and not np.array_equal(results[0].out, results[1].out)
    out = [np.zeros((1, Q_HEADS, DIM), np.float32) for _ in batch]
    several.attend(batch, out=out)
    assert all(np.array_equal(one, other.out) for one, other in zip(out, expected, strict=True))
    with several.decode() as stream:
        for _ in range(3):
            assert same(stream.attend(batch), expected)
    for i, name in enumerate(SESSIONS[:6]):
        session = several.session(name)
        assert np.array_equal(session.fetch(0)[0], k + i)
        session.truncate(60)
        assert session.info().lengths == [60]
    for call in (several.status, several.metrics, lambda: several.calibration("m"), lambda: next(several.watch())):
        with pytest.raises(qkvd.FailedPrecondition, match="the client has 3"):
            call()


def test_failures_keep_their_places(several, rows, queries):
    fill(several, rows)
    batch = [qkvd.Item(session=name, position=63, q=queries(1)) for name in [*SESSIONS, "nobody"]]
    results = several.attend(batch)
    assert [isinstance(result.error, qkvd.NotFound) for result in results] == [False] * len(SESSIONS) + [True]


def test_answers_are_merged(several, rows):
    fill(several, rows)
    found = several.has_sessions(["nobody", *SESSIONS])
    assert [bool(one) for one in found] == [False] + [True] * len(SESSIONS) and found[1].tokens == 64
    assert [info.session for info in several.sessions()] == sorted(SESSIONS)
    assert several.match("m", IDS).session == SESSIONS[5]
    with pytest.raises(qkvd.NotFound):
        several.match("other", IDS)
    assert [model.model.name for model in several.models()] == ["m"] and several.model("m").model.layers == 1
    answer = several.put_objects([(name, name.encode()) for name in SESSIONS])
    assert answer.objects == len(SESSIONS)
    assert [bytes(one or b"").decode() for one in several.get_objects(SESSIONS)] == SESSIONS
    for count in (0, len(SESSIONS) + 1):
        with pytest.raises(qkvd.InvalidArgument, match=f"out has {count} entries"):
            several.get_objects(SESSIONS, out=[bytearray(20) for _ in range(count)])
    assert several.has_objects(["nobody", *SESSIONS])[:2] == [0, len(SESSIONS[0])]
    assert [info.object for info in several.objects()] == sorted(SESSIONS)
    assert several.delete_objects(["nobody", *SESSIONS]) == [False] + [True] * len(SESSIONS)


def test_placement(several, targets, rows):
    several.open("a", model="m")
    outcomes = set()
    for i in range(20):
        with contextlib.suppress(qkvd.FailedPrecondition):
            several.session("a").fork(f"fork-{i}").close()
            outcomes.add("forked")
            continue
        outcomes.add("refused")
    assert outcomes == {"forked", "refused"}
    with qkvd.Client(targets, placement="worker-7") as placed:
        with placed.open("b", model="m") as session:
            session.append(0, *rows(3))
            for i in range(5):
                session.fork(f"b-{i}").close()
        assert placed.status().state == "serving"


def test_one_is_killed(rows, queries):
    """Its sessions move, and no others; models are there where sessions are opened anew."""
    with contextlib.ExitStack() as stack:
        daemons = [stack.enter_context(Daemon()) for _ in range(3)]
        client = stack.enter_context(qkvd.Client(",".join(one.target for one in daemons), retry_for=PATIENCE))
        client.register_model(MODEL)
        fill(client, rows)
        stream = stack.enter_context(client.decode())
        batch = [qkvd.Item(session=name, position=63, q=queries(1)) for name in SESSIONS]
        before = stream.attend(batch)
        lost = held(client)[daemons[1].target]
        daemons[1].kill()
        after = client.attend(batch)
        assert all(
            isinstance(result.error, qkvd.NotFound) == (name in lost) for result, name in zip(after, SESSIONS, strict=True)
        )
        stayed = [i for i, name in enumerate(SESSIONS) if name not in lost]
        assert same([after[i] for i in stayed], [before[i] for i in stayed])
        stream.attend(batch)  # its stream has ended
        assert all((result.error is None) == (i in stayed) for i, result in enumerate(stream.attend(batch)))
        for name in lost:
            client.open(name, model="m")
        daemons[1].start()
        until = time.monotonic() + PATIENCE
        while client.has_sessions([next(iter(lost))])[0]:
            assert time.monotonic() < until
            time.sleep(0.05)
        for name in lost:
            client.open(name, model="m")
        assert held(client)[daemons[1].target] == lost


def test_async(several, targets, rows, queries):
    k, _ = fill(several, rows)
    batch = [qkvd.Item(session=name, position=63, q=queries(1)) for name in [*SESSIONS, "nobody"]]
    expected = several.attend(batch[:-1])

    async def work():
        async with qkvd.AsyncClient(targets) as client:
            await client.register_model(MODEL)
            results = await client.attend(batch)
            assert same(results[:-1], expected) and isinstance(results[-1].error, qkvd.NotFound)
            async with client.decode() as stream:
                for _ in range(2):
                    assert same((await stream.attend(batch))[:-1], expected)
            assert [bool(one) for one in await client.has_sessions(["nobody", *SESSIONS[:5]])] == [False] + [True] * 5
            assert (await client.match("m", IDS)).session == SESSIONS[5]
            assert [info.session async for info in client.sessions()] == sorted(SESSIONS)
            assert np.array_equal((await (await client.session(SESSIONS[2])).fetch(0))[0], k + 2)
            with pytest.raises(qkvd.FailedPrecondition, match="the client has 3"):
                await client.status()
            answer = await client.put_objects([(name, name.encode()) for name in SESSIONS])
            assert answer.objects == len(SESSIONS)
            assert [bytes(one or b"").decode() for one in await client.get_objects(SESSIONS)] == SESSIONS
            with pytest.raises(qkvd.InvalidArgument, match="out has 0 entries"):
                await client.get_objects(SESSIONS, out=[])
            assert [info.object async for info in client.objects()] == sorted(SESSIONS)
            assert all(await client.delete_objects(SESSIONS)) and not any(await client.has_objects(SESSIONS))
            await client.append([qkvd.Item(session=name, position=64, k=k[:1], v=k[:1]) for name in SESSIONS])
        async with qkvd.AsyncClient(targets, placement="x") as placed:
            assert (await placed.status()).state == "serving"

    asyncio.run(work())
    assert all(one.tokens == 65 for one in several.has_sessions(SESSIONS))


class Recorder(grpc.GenericRpcHandler):
    """A server that answers nothing and keeps each call's key."""

    def __init__(self):
        self.keys = []

    def service(self, details):
        method = details.method.rpartition("/")[2]
        self.keys.append((method, dict(details.invocation_metadata).get("x-qkv-session")))
        return None


def calls_of_a_session(client, rows):
    item = qkvd.Item(session="s", k=rows[0], v=rows[1])
    return [
        lambda: client.open("s", model="m"),
        lambda: client.session_info("s"),
        lambda: client.append([item]),
        lambda: client.attend([item]),
        lambda: list(client.fetch_rows("s")),
        lambda: client.put_object("s", b"1"),
        lambda: client.get_object("s"),
        lambda: client.has_sessions(["s"]),
        lambda: client.close_session("s"),
        lambda: client.put("s", [rows], model="m"),
        lambda: client.decode().attend([item]),
        lambda: client.attention_stats("s"),
        lambda: client.has_objects(["s"]),
    ]


@pytest.fixture
def recorded():
    """The keys of calls to a server that answers none of them, and its target."""
    recorder = Recorder()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((recorder,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield recorder.keys, f"127.0.0.1:{port}"
    server.stop(None)


@pytest.mark.parametrize(("placement", "expected"), [("", "s"), ("label", "label")])
def test_calls_have_their_key(rows, recorded, placement, expected):
    """What a proxy sees: the session's name, or the placement."""
    keys, target = recorded
    with qkvd.Client(target, placement=placement, native=False) as client:
        calls = calls_of_a_session(client, rows(1))
        for call in calls:
            with pytest.raises(qkvd.Error):
                call()
        assert len(keys) == len(calls) and {key for _, key in keys} == {expected}
        with pytest.raises(qkvd.Error):
            client.match("m", IDS)
        assert keys[-1] == ("Match", placement or None)


@pytest.mark.skipif(not native.installed(), reason="qkvd-native is not installed")
def test_others_stand_in_where_libqkv_finds_nobody(rows):
    with Daemon() as gone, Daemon() as well, qkvd.Client(f"{gone.target},{well.target}") as client:
        client.register_model(MODEL)
        name = next(name for name in SESSIONS if owner_of(name, gone, well) is gone)
        session = client.open(name, model="m")
        session.append(0, *rows(3))
        gone.kill()
        with pytest.raises(qkvd.Unavailable):
            session.append(0, *rows(3), coded=1)  # is not repeated
        for call in (lambda: session.append(0, *rows(3), coded=1), lambda: session.fetch(0, coded=1)):
            with pytest.raises(qkvd.NotFound):
                call()
        client._daemons.all[0].suspect = False  # as before the first call that finds nobody
        with pytest.raises(qkvd.NotFound):
            session.fetch(0)


@pytest.mark.skipif(not native.installed(), reason="qkvd-native is not installed")
@pytest.mark.parametrize(("placement", "expected"), [("", "s"), ("label", "label")])
def test_calls_of_libqkv_have_their_key(rows, recorded, placement, expected):
    """By libqkv, then, as that has failed, by grpcio."""
    keys, target = recorded
    with qkvd.Client(target, placement=placement, native=True) as client, pytest.raises(qkvd.Error):
        client.append([qkvd.Item(session="s", k=rows(1)[0], v=rows(1)[1])])
    assert [key for method, key in keys if method == "Append"] == [expected] * 2
