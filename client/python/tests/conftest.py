"""Fixtures: a daemon for each test file, a client, a model and sessions of its own for each test."""

import re

import numpy as np
import pytest
from daemon import PATIENCE, Daemon

import qkvd

LAYERS, KV_HEADS, Q_HEADS, DIM = 2, 2, 4, 16


@pytest.fixture(scope="module")
def daemon():
    with Daemon("--limit-models", "1000") as running:
        yield running


@pytest.fixture
def client(daemon):
    with qkvd.Client(daemon.target) as client:
        yield client
        assert client.status().state == "serving"


@pytest.fixture
def name(request):
    """A name of the test's own."""
    return re.sub(r"[^A-Za-z0-9._:/@-]", "-", request.node.name)[:100]


@pytest.fixture
def model(client, name):
    """A small model, fp32, exact unless a session says otherwise."""
    model = qkvd.Model(
        name=name, layers=LAYERS, kv_heads=KV_HEADS, q_heads=Q_HEADS, key_dim=DIM, value_dim=DIM, dtype="fp32",
        policy=qkvd.EXACT,
    )  # fmt: skip
    client.register_model(model)
    return model


@pytest.fixture
def session(client, model, name):
    with client.open(name, model=model.name) as session:
        yield session


@pytest.fixture
def patient(monkeypatch):
    """Forks wait for as long as calls take, however busy the machine."""
    monkeypatch.setattr("qkvd.locks.FORK_WAITS", PATIENCE)
    monkeypatch.setattr("qkvd.locks.SETTLES", PATIENCE)


@pytest.fixture
def random():
    return np.random.default_rng(1)


@pytest.fixture
def rows(random):
    """rows(tokens) -> k, v; of fp32."""

    def make(tokens):
        return tuple(random.standard_normal((tokens, KV_HEADS, DIM), np.float32) for _ in range(2))

    return make


@pytest.fixture
def queries(random):
    return lambda count: random.standard_normal((count, Q_HEADS, DIM), np.float32)


def attention(q, k, v, first, window=0, soft_cap=0.0, scale=None):
    """Causal attention in float64 of queries from position `first` on: (out, lse)."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    k, v = (np.repeat(a, q.shape[1] // a.shape[1], axis=1) for a in (k, v))
    scores = np.einsum("qhd,thd->qht", q, k) * (1 / np.sqrt(q.shape[2]) if scale is None else scale)
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    at, keys = first + np.arange(len(q))[:, None], np.arange(len(k))[None, :]
    seen = (keys <= at) & ((keys > at - window) if window else True)
    scores = np.where(seen[:, None, :], scores, -np.inf)
    lse = np.logaddexp.reduce(scores, axis=2)
    return np.einsum("qht,thd->qhd", np.exp(scores - lse[..., None]), v), lse


FLOATS = qkvd.AttendOptions(precision="fp32")
