"""Rows by libqkv: what qkvd-native changes is the way, not what comes."""

import gc
import os
import threading

import numpy as np
import pytest
from conftest import DIM, KV_HEADS, Q_HEADS
from daemon import Daemon, wait_for

import qkvd

pytest.importorskip("qkvd_native")
TOKENS = 3000  # more than one message


@pytest.fixture
def native(daemon):
    with qkvd.Client(daemon.target, native=True) as client:
        yield client


@pytest.fixture
def alone(native, monkeypatch):
    """A client that cannot move rows by grpcio."""
    stub = native._stub

    def refuse(kind, method):
        assert not method.endswith(("/Append", "/Fetch")), f"{method} went by grpcio"
        return stub(kind, method)

    monkeypatch.setattr(native, "_stub", refuse)
    return native


@pytest.fixture
def coded(client, name):
    """A model whose rows are coded."""
    model = qkvd.Model(
        name=name, layers=2, kv_heads=KV_HEADS, q_heads=Q_HEADS, key_dim=DIM, value_dim=DIM, dtype="fp16",
        rope=qkvd.Rope(theta=10000), policy=qkvd.Policy(bits_k=4, bits_v=4, recent_window=30),
    )  # fmt: skip
    client.register_model(model)
    return model


def same(one, other):
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_rows_in_and_out(alone, client, model, name, rows):
    k, v = rows(TOKENS)
    with alone.open(name, model=model.name, tokens=list(range(TOKENS))) as session:
        assert session.append(0, k[:70], v[:70]) == 70
        assert session.append(0, k[70:], v[70:]) == TOKENS - 70
        assert session.append(0, k, v, position=0) == 0
        assert same(session.fetch(0), (k, v))
        assert same(session.fetch(0, begin=100, end=2500), (k[100:2500], v[100:2500]))
        assert same(session.fetch(0, dtype="fp16"), (k.astype(np.float16), v.astype(np.float16)))
        out = np.zeros((TOKENS + 1, KV_HEADS, DIM), np.float32), np.zeros((TOKENS + 1, KV_HEADS, DIM), np.float32)
        got = session.fetch(0, out=out)
        assert got[0].base is out[0] and same(got, (k, v)) and not out[0][TOKENS:].any()
        # What another client sees.
        assert same(client.session(name).fetch(0), (k, v))
        session.append(1, k, v)
        assert client.match(model.name, list(range(TOKENS))).tokens == TOKENS // 64 * 64


def test_strided_rows(alone, model, name, rows):
    k, v = rows(TOKENS)
    turned = [np.ascontiguousarray(a.transpose(1, 0, 2)).transpose(1, 0, 2) for a in (k, v)]
    with alone.open(name, model=model.name) as session:
        session.append(0, *turned)
        session.append(1, k[::2], v[::2])
        assert same(session.fetch(0), (k, v)) and same(session.fetch(1), (k[::2], v[::2]))


@pytest.mark.parametrize("purpose", ["attend", "fetch"])
def test_coded_both_ways(alone, client, coded, name, rows, purpose):
    k, v = (a.astype(np.float16) for a in rows(1000))
    with alone.open(name, model=coded.name, purpose=purpose) as session:
        assert session.append(0, k, v) == 1000
        assert session.append(1, k, v, coded=2) == 1000
        assert session.lengths == (1000, 1000)
        plain = client.session(name)
        assert same(session.fetch(0, coded=2), plain.fetch(0))
        # What was coded here is what the daemon codes.
        assert same(plain.fetch(1), plain.fetch(0))
        assert same(
            session.fetch(1, begin=70, end=500, dtype="fp32", coded=1), plain.fetch(1, begin=70, end=500, dtype="fp32")
        )
        assert same(session.fetch(0, rope="before", coded=2), plain.fetch(0, rope="before"))
        with pytest.raises(qkvd.InvalidArgument, match="coded is 65, allowed are 1 to 64 threads"):
            session.fetch(0, coded=65)
        with pytest.raises(qkvd.InvalidArgument, match="both parts, tokens first"):
            session.fetch(0, coded=1, heads_first=True)
        with pytest.raises(qkvd.InvalidArgument, match="out is not two dense arrays"):
            session.fetch(0, coded=1, out=(np.zeros((1000, 1, DIM), np.float16),) * 2)
        with pytest.raises(qkvd.InvalidArgument, match="capacity is 999"):
            session.fetch(0, coded=1, out=(np.zeros((999, KV_HEADS, DIM), np.float16),) * 2)


def test_errors_are_the_same(native, model, name, rows):
    k, v = rows(10)
    with native.open(name, model=model.name) as session:
        session.append(0, k, v)
        with pytest.raises(qkvd.FailedPrecondition, match="10"):
            session.append(0, k, v, position=11)
        with pytest.raises(qkvd.AlreadyExists):
            session.append(0, k + 1, v, position=0)
        with pytest.raises(qkvd.InvalidArgument, match="position is -1"):
            session.append(0, k, v, position=-1)
        with pytest.raises(qkvd.InvalidArgument, match="rope is 'x'"):
            session.append(0, k, v, rope="x")
        with pytest.raises(qkvd.InvalidArgument, match="room for 9 tokens"):
            session.fetch(0, out=(np.zeros((9, KV_HEADS, DIM), np.float32),) * 2)
        with pytest.raises(qkvd.InvalidArgument, match="float64"):
            session.fetch(0, out=(np.zeros((10, KV_HEADS, DIM)),) * 2)
        # Longer than the session object knows.
        native.session(name).append(0, k, v)
        assert len(session.fetch(0)[0]) == 20
    with pytest.raises(qkvd.NotFound, match=name):
        session.fetch(0)
    with pytest.raises(qkvd.NotFound, match=name):
        session.append(0, k, v)
    with pytest.raises(qkvd.NotFound, match=name):
        session.fetch(0, coded=1)


def test_where_libqkv_is_not_used(daemon, model, name, rows):
    k, v = rows(10)
    with qkvd.Client(daemon.target, native=False) as client, client.open(name, model=model.name) as session:
        session.append(0, k, v)
        assert same(session.fetch(0), (k, v))
        with pytest.raises(qkvd.Unimplemented, match="native=False"):
            session.fetch(0, coded=1)
        with pytest.raises(qkvd.Unimplemented, match="native=False"):
            session.append(1, k, v, coded=1)


def test_tenants(daemon, model, name, rows):
    k, v = rows(10)
    with qkvd.Client(daemon.target, native=True, tenant="other") as other:
        other.register_model(model)
        with other.open(name, model=model.name) as session:
            session.append(0, k, v)
            assert same(session.fetch(0), (k, v)) and session.info().lengths[0] == 10


def test_threads(alone, model, name, rows):
    k, v = rows(TOKENS)
    results = []

    def run(i):
        with alone.open(f"{name}-{i}", model=model.name) as session:
            for _ in range(5):
                session.append(0, k, v)
                results.append(same([a[-TOKENS:] for a in session.fetch(0)], (k, v)))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 40


def test_a_daemon_that_stops_and_one_that_comes_back(rows):
    model = qkvd.Model(
        name="m", layers=1, kv_heads=KV_HEADS, q_heads=Q_HEADS, key_dim=DIM, value_dim=DIM, dtype="fp32", policy=qkvd.EXACT
    )
    k, v = rows(TOKENS)
    with Daemon() as daemon, qkvd.Client(daemon.target, native=True, retry_for=60) as client:
        client.register_model(model)
        session = client.open("s", model="m")
        session.append(0, k, v)
        session.fetch(0)
        with daemon.stopped():
            with pytest.raises(qkvd.DeadlineExceeded, match=r"Append was not answered within 0\.3 s"):
                session.append(0, k, v, timeout=0.3)
            with pytest.raises(qkvd.DeadlineExceeded, match=r"Fetch was not answered within 0\.3 s"):
                session.fetch(0, timeout=0.3)
        daemon.kill()
        daemon.start()
        client.register_model(model)
        session = client.open("s", model="m")
        assert session.append(0, k, v) == TOKENS and same(session.fetch(0), (k, v))


def test_a_client_that_nobody_has_leaves_no_connection(daemon, client, model, name, rows):
    def opened():
        return len(os.listdir("/proc/self/fd"))

    with client.open(name, model=model.name) as session:
        before = opened()
        other = qkvd.Client(daemon.target, native=True)
        other.append([qkvd.Item(session=session.name, k=rows(1)[0], v=rows(1)[1])])
        assert opened() > before
        del other
        gc.collect()
        wait_for(lambda: opened() <= before, "a connection stays")


@pytest.mark.filterwarnings("ignore:This process")
def test_a_child_goes_by_grpcio(native, model, name, rows, patient):
    from qkvd import connection

    if not connection.SERVES_CHILDREN:
        pytest.skip("grpcio before 1.80 serves no children")
    k, v = rows(TOKENS)
    with native.open(name, model=model.name) as session:
        session.append(0, k, v)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                ok = same(session.fetch(0), (k, v)) and session.append(0, k, v) == TOKENS
                try:
                    session.fetch(0, coded=1)
                except qkvd.Unimplemented as error:
                    code = 0 if ok and "fork" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert same([a[:TOKENS] for a in session.fetch(0)], (k, v))
