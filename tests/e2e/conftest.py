"""Fixtures: a daemon for each test file, which must live and serve after every test."""

import re

import pytest

from daemon import PATIENCE, Daemon
from health.v1 import health_pb2, health_pb2_grpc
from kv import Cache


@pytest.fixture(scope="module")
def daemon():
    with Daemon("--limit-models", "1000") as running:  # every test registers its own
        yield running


@pytest.fixture
def stub(daemon):
    yield daemon.stub()
    assert daemon.alive(), daemon.log_text()
    answer = health_pb2_grpc.HealthStub(daemon.channel()).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    daemon.disconnect()


@pytest.fixture
def name(request):
    """A session name of the test's own."""
    return re.sub(r"[^A-Za-z0-9._:/@-]", "-", request.node.name)[:100]


@pytest.fixture
def make_cache(stub, name):
    """Makes caches (kv.Cache) named after the test."""
    made = []

    def make(**fields):
        made.append(Cache(stub, f"{name}-{len(made)}", **fields))
        return made[-1]

    return make
