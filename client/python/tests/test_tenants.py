"""Clients of two tenants, with sessions of one name that have nothing to do with each other."""

import asyncio
import contextlib
import dataclasses
import logging

import numpy as np
import pytest
from conftest import LAYERS

import qkvd
from qkvd.prefixes import Options, Prefixes


@pytest.fixture
def other(daemon):
    with qkvd.Client(daemon.target, tenant="other") as client:
        yield client


@pytest.fixture
def pair(client, other, model, name, rows):
    """The two sessions, of 100 and 200 tokens with ids, and the second one's rows."""
    sessions, filled = [], []
    for one, tokens in ((client, 100), (other, 200)):
        one.register_model(model)
        session = one.open(name, model=model.name, tokens=list(range(tokens)))
        filled.append(rows(tokens))
        for layer in range(LAYERS):
            session.append(layer, *filled[-1])
        sessions.append(session)
    yield *sessions, filled[1]
    for session in sessions:
        with contextlib.suppress(qkvd.NotFound):
            session.close()


def test_each_reads_its_own(client, other, pair, model, name, queries):
    first, second, (k, v) = pair
    assert np.array_equal(second.fetch(0)[0], k) and np.array_equal(second.fetch(1)[1], v)
    assert len(first.fetch(0)[0]) == 100
    for one, tokens in ((client, 100), (other, 200)):
        item = qkvd.Item(session=name, q=queries(1), position=10)
        assert one.attend([item])[0].length == tokens
        with one.decode() as stream:
            assert stream.attend([item])[0].length == tokens
        assert one.session(name).lengths == (tokens,) * LAYERS
        assert [held.tokens for held in one.has_sessions([name, "nobody"])] == [tokens, 0]
        match = one.match(model.name, range(300))
        assert (match.session, match.tokens) == (name, tokens // 64 * 64)
        assert len(one.attention_stats(name)) == LAYERS * 2
    assert other.session_info(name).tenant == "other"
    assert [info.tenant for info in other.sessions(name)] == ["other"]
    assert [info.tenant for info in client.sessions(name)] == ["default", "other"]  # no tenant: all
    assert [info.tenant for info in client.sessions(name, tenant="default")] == ["default"]
    told = next(other.watch(model=model.name))
    assert {event.tenant for event in told.events} == {"other"}


def test_each_changes_its_own(client, other, pair, model, name, rows):
    first, second, (k, _) = pair
    with second.fork(f"{name}-fork", 64) as fork:
        assert fork.lengths == (64,) * LAYERS
        with pytest.raises(qkvd.NotFound, match=f"no session {name}-fork$"):
            client.session(fork.name)
        first.truncate(5)
        second.pin()
        second.touch(ttl=50)
        info = first.info()
        assert (min(info.lengths), info.pinned, info.ttl_ms) == (5, False, 0)
        assert np.array_equal(second.fetch(0)[0], k)
    client.put(f"{name}-put", [rows(10)] * LAYERS, model=model.name)
    other.put(f"{name}-put", [rows(20)] * LAYERS, model=model.name)
    assert [one.session(f"{name}-put").lengths[0] for one in (client, other)] == [10, 20]
    for one in (client, other):
        one.close_session(f"{name}-put")
    first.close()
    assert second.info().lengths[0] == 200
    with pytest.raises(qkvd.NotFound):
        client.session(name)


def test_models(client, other, model, name):
    """One of a name for each tenant, and one that is shared with those that have none."""
    wider, base = (dataclasses.replace(model, name=f"{name}-{of}", key_dim=128) for of in ("own", "base"))
    client.register_model(dataclasses.replace(model, name=wider.name))
    with pytest.raises(qkvd.NotFound, match=f"no model {wider.name} of tenant other$"):
        other.model(wider.name)
    assert (other.register_model(wider).tenant, other.model(wider.name).model.key_dim) == ("other", 128)
    assert [(one.tenant, one.model.key_dim) for one in client.models() if one.model.name == wider.name] == [
        ("default", model.key_dim),
        ("other", 128),
    ]  # no tenant: all
    shared = dataclasses.replace(base, shared=True)
    assert client.register_model(shared).shared
    with pytest.raises(qkvd.InvalidArgument, match="the call's tenant is other"):
        other.register_model(shared)
    answer = other.register_model(base)
    assert (answer.tenant, answer.shared) == ("default", True)
    assert [one.tenant for one in other.models() if one.model.name in (wider.name, base.name)] == ["default", "other"]


def test_a_connector_says_whether_it_teaches(client, model, daemon, name):
    """A shared model; of its own model a tenant's rows teach unless it says otherwise."""
    client.register_model(dataclasses.replace(model, name=f"{name}-base", policy=None, shared=True))
    base = dataclasses.replace(model, name=f"{name}-base", policy=None)
    own = dataclasses.replace(base, name=f"{name}-own")
    for of, said, teaches in ((base, None, False), (base, True, True), (own, None, True), (own, False, False)):
        settings = {"target": daemon.target, "tenant": "other", "timeout": 30, "self_calibration": said}
        prefixes = Prefixes(Options.of(settings), of, logging.getLogger("test"))
        session = f"{of.name}-{said}"
        assert prefixes.open(session, np.arange(64), b"") == 0
        with qkvd.Client(daemon.target, tenant="other") as other:
            assert other.session_info(session).policy.self_calibration is teaches
        prefixes.close()
    with pytest.raises(qkvd.InvalidArgument, match="self_calibration is 'yes'"):
        Options.of({"self_calibration": "yes"})


def test_asyncio(daemon, pair, name):
    async def work():
        async with qkvd.AsyncClient(daemon.target, tenant="other") as client:
            return (await client.session(name)).lengths[0], [info.tenant async for info in client.sessions(name)]

    assert asyncio.run(work()) == (200, ["other"])


def test_a_tenant_is_a_name(daemon, other):
    for tenant in ("no name", "x" * 129, "é"):
        with pytest.raises(qkvd.InvalidArgument, match="tenant"):
            qkvd.Client(daemon.target, tenant=tenant)
    with pytest.raises(qkvd.InvalidArgument, match="tenant is third, the call's qkv-tenant is other"):
        list(other.sessions(tenant="third"))
