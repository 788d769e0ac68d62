"""Mutual TLS and tokens against a real daemon, by the client and by what connectors share."""

import logging
import os
import subprocess
import time

import numpy as np
import pytest
from conftest import DIM, KV_HEADS, Q_HEADS
from daemon import binary, wait_for
from secured import Secured

import qkvd
from qkvd import native
from qkvd.prefixes import Options, Prefixes

MODEL = qkvd.Model(
    name="m", layers=2, kv_heads=KV_HEADS, q_heads=Q_HEADS, key_dim=DIM, value_dim=DIM, dtype="fp32", policy=qkvd.EXACT
)
LOG = logging.getLogger("test")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Secured(tmp_path_factory.mktemp("secured")) as running:
        yield running


def arguments(daemon, way):
    """Of a client: its certificate, a token as well, or a token alone, by the unix socket."""
    return {
        "certificate": {"target": daemon.tcp, "tls": daemon.tls},
        "both": {"target": daemon.tcp, "tls": daemon.tls, "token": daemon.token},
        "token": {"target": daemon.target, "token": daemon.token},
    }[way]


@pytest.mark.parametrize("way", ["certificate", "both", "token"])
def test_rows(daemon, name, rows, way):
    k, v = rows(3000)
    with qkvd.Client(**arguments(daemon, way)) as client:
        client.register_model(MODEL)
        with client.open(name, model="m") as session:
            session.append(0, k, v)
            assert np.array_equal(session.fetch(0)[0], k)
            assert client.session_info(name).tenant == "team-a"
            if native.installed():
                session.append(1, k, v, coded=1)
                assert np.array_equal(session.fetch(1, coded=1)[1], v)


@pytest.mark.parametrize("way", ["certificate", "both", "token"])
def test_rows_by_libqkv(daemon, name, rows, way, monkeypatch):
    pytest.importorskip("qkvd_native")
    k, v = rows(3000)
    with qkvd.Client(**arguments(daemon, way), native=True) as client:
        client.register_model(MODEL)
        stub = client._stub

        def refuse(kind, method):
            assert not method.endswith(("/Append", "/Fetch")), f"{method} went by grpcio"
            return stub(kind, method)

        monkeypatch.setattr(client, "_stub", refuse)
        with client.open(name, model="m") as session:
            session.append(0, k, v)
            assert np.array_equal(session.fetch(0)[0], k)


def test_what_libqkv_does_not_take(daemon):
    if not native.installed():
        pytest.skip("qkvd-native is not installed")
    for other in (qkvd.Tls(), qkvd.Tls(ca=daemon.tls.ca, server_name="kv.example")):
        with pytest.raises(qkvd.Unimplemented, match="only with a `ca`, and no `server_name`"):
            qkvd.Client(daemon.tcp, tls=other, native=True)


def test_who_is_refused(daemon):
    for other in (None, qkvd.Tls(ca=daemon.tls.ca), True):
        with qkvd.Client(daemon.tcp, tls=other, retry_for=0) as client, pytest.raises(qkvd.Unavailable):
            client.models()
    with qkvd.Client(daemon.target, token="x" * 64) as client, pytest.raises(qkvd.Unauthenticated):
        client.models()


@pytest.mark.parametrize("way", ["certificate", "server name", "token", "token file"])
def test_connectors(daemon, rows, way):
    """What vLLM's, SGLang's and LMCache's connectors hold in common."""
    settings = {
        "certificate": daemon.settings,
        "server name": daemon.settings | {"tls_server_name": "qkvd"},
        "token": {"target": daemon.target, "token": daemon.token},
        "token file": {"target": daemon.target, "token_file": daemon.file("token")},
    }[way]
    name, ids = way.replace(" ", "-"), np.arange(64) + 1000 * sum(way.encode())
    prefixes = Prefixes(Options.of(settings | {"bits": "exact", "timeout": 30, "lookup_timeout": 30}), MODEL, LOG)
    k, v = rows(64)
    assert prefixes.open(name, ids, b"") == 0
    prefixes.append(name, 0, ids, [(k, v)] * 2)
    assert prefixes.match(ids, b"").session == name
    (piece,) = prefixes.fetch(name, [0], 0, 64, 64)
    assert np.array_equal(piece.k.transpose(1, 0, 2), k)
    assert prefixes.put_pages({name: k}) == 1
    prefixes.close()


def test_a_token_file_in_the_middle_of_being_written(tmp_path, monkeypatch):
    """What could not be read is read again, though the file's time is the same: clocks of file systems are coarse."""
    monkeypatch.setattr("qkvd.connection.TOKEN_FILE_SECONDS", 0)
    path = tmp_path / "token"
    path.write_text("old")
    file = qkvd.connection.TokenFile(path)
    for text, token in (("", "old"), ("new", "new")):
        path.write_text(text)
        os.utime(path, ns=(10**18, 10**18))
        assert file.token() == token


@pytest.mark.parametrize("by_libqkv", [False, True])
def test_a_renewed_token_is_read(tmp_path, name, rows, by_libqkv):
    if by_libqkv:
        pytest.importorskip("qkvd_native")
    k, v = rows(10)
    path = tmp_path / "renewed"

    def renew(token):
        """In one step, as the kubelet does."""
        (tmp_path / "new").write_text(f"{token}\n")
        (tmp_path / "new").rename(path)

    with Secured(tmp_path) as daemon:
        renew(daemon.token)
        new = subprocess.run([binary("qkvctl"), "token", "new", "team-a"], check=True, capture_output=True, text=True)
        token, line = new.stdout.splitlines()
        with qkvd.Client(daemon.target, token_file=path, native=by_libqkv) as client:
            client.register_model(MODEL)
            session = client.open(name, model="m")
            session.append(0, k, v)
            (tmp_path / "tokens").write_text(f"{line}\n")

            def outcome():
                try:
                    return np.array_equal(session.fetch(0)[0], k)
                except qkvd.Unauthenticated:
                    return None

            wait_for(lambda: outcome() is None, "the old token is still accepted")
            renew("two words")  # is none: the one before stays
            time.sleep(1.5)
            assert outcome() is None
            renew(token)
            wait_for(outcome, "the new token is not read")
    with pytest.raises(qkvd.InvalidArgument, match="token and token_file are both given"):
        qkvd.Client(daemon.target, token="t", token_file=path)


def test_a_connector_that_is_refused_only_misses(daemon):
    prefixes = Prefixes(Options.of({"target": daemon.tcp}), MODEL, LOG)
    assert prefixes.match(list(range(64)), b"").tokens == 0
    prefixes.close()


def test_settings(daemon):
    of = {key: value for key, value in daemon.settings.items() if key != "tls_ca"}
    for settings, text in (
        (of, "need tls_ca"),
        ({"token": "a", "token_file": "b"}, "token and token_file are both given"),
    ):
        with pytest.raises(qkvd.InvalidArgument, match=text):
            Options.of(settings)
    for settings, text in (
        (daemon.settings | {"tls_ca": "/none.pem"}, r"tls: ca cannot be read: .*/none\.pem"),
        (daemon.settings | {"tls_key": None}, "certificate and key come together"),
        (daemon.settings | {"target": daemon.target}, "target unix:.* has none"),
        ({"token_file": "/none"}, "token_file cannot be read"),
        ({"token": "two words"}, "token is empty, or has other characters"),
    ):
        with pytest.raises(qkvd.InvalidArgument, match=text):
            Prefixes(Options.of(settings), MODEL, LOG)
