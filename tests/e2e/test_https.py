"""HTTPS for operators: --admin-tls."""

import contextlib
import hashlib
import http.client
import signal
import socket
import ssl

import pytest

from daemon import PATIENCE, Daemon, wait_for
from test_http import ADMIN, address, check_health, refusal
from test_identity import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("https"), "ours")


@pytest.fixture(scope="module")
def server(authority):
    return authority.issue("daemon")


def tls(pair, *more):
    return (*ADMIN, "--admin-tls", "--tls-cert", str(pair[0]), "--tls-key", str(pair[1]), *more)


def endpoint(daemon):
    host, port = address(daemon).rsplit(":", 1)
    return host, int(port)


def connect(daemon, authority):
    return http.client.HTTPSConnection(*endpoint(daemon), timeout=PATIENCE,
                                       context=ssl.create_default_context(cafile=str(authority.ca)))


def ask(connection, path, **headers):
    """Status and body."""
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def subject(connection):
    return dict(part[0] for part in connection.sock.getpeercert()["subject"])["commonName"]


def version_with(daemon, most):
    """What is agreed on with a client that knows no later version."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, most
    with socket.create_connection(endpoint(daemon), timeout=PATIENCE) as plain, context.wrap_socket(plain) as secure:
        return secure.version()


def test_it_is_encrypted(authority, server, tmp_path):
    auth = tmp_path / "auth"
    auth.write_text(f"token sha256:{hashlib.sha256(b'mine').hexdigest()} * read\n")
    with Daemon(*tls(server, "--admin-auth", "--auth-file", str(auth))) as daemon:
        connection = connect(daemon, authority)
        assert ask(connection, "/health/ready") == (200, "ready\n")
        assert ask(connection, "/metrics")[0] == 401
        assert "qkvd_ready 1" in ask(connection, "/metrics", Authorization="Bearer mine")[1]  # by a worker
        assert "<!doctype html>" in ask(connection, "/")[1].lower()
        stranger = ssl.create_default_context()
        with pytest.raises(ssl.SSLCertVerificationError):
            http.client.HTTPSConnection(*endpoint(daemon), timeout=PATIENCE, context=stranger).connect()
        with socket.create_connection(endpoint(daemon), timeout=PATIENCE) as plain:
            plain.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert b"HTTP" not in plain.recv(100)
        assert [version_with(daemon, most) for most in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)] == ["TLSv1.2", "TLSv1.3"]
        with pytest.raises(OSError):
            version_with(daemon, ssl.TLSVersion.TLSv1_1)
        encrypted = {"QKVD_ADMIN_TLS": "true", "QKVD_TLS_CERT": "any", "QKVD_TLS_KEY": "any"}
        assert check_health(address(daemon), **encrypted) == (0, "")
        assert "does not answer" in check_health(address(daemon))[1]
    with Daemon(*ADMIN) as daemon:
        assert "does not answer" in check_health(address(daemon), **encrypted)[1]


def test_certificate_is_read_anew(authority, server, tmp_path):
    """New connections show it; those that are there go on."""
    paths = [tmp_path / "current.pem", tmp_path / "current.key"]

    def install(pair):
        for to, path in zip(paths, pair, strict=True):
            to.with_suffix(".new").write_bytes(path.read_bytes())
            to.with_suffix(".new").rename(to)

    def shown():
        connection = connect(daemon, authority)
        connection.connect()
        try:
            return subject(connection)
        finally:
            connection.close()

    install(server)
    with Daemon(*tls(paths)) as daemon:
        kept = connect(daemon, authority)
        kept.connect()
        install(authority.issue("renewed"))
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(lambda: shown() == "renewed", "the new certificate is not shown")
        assert subject(kept) == "daemon" and ask(kept, "/health/live")[0] == 200


def test_handshakes_that_do_not_end_keep_nobody_out(authority, server):
    with Daemon(*tls(server)) as daemon:
        silent = [socket.create_connection(endpoint(daemon), timeout=PATIENCE) for _ in range(100)]
        for connection in silent[::2]:
            connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00")
        for _ in range(20):
            assert ask(connect(daemon, authority), "/health/live")[0] == 200
        for connection in silent:  # those that came last after some seconds
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(100):
                    pass
            connection.close()


def test_wrong_options(server):
    assert "--admin-tls needs --admin-listen, --tls-cert" in refusal(*ADMIN, "--admin-tls")
    assert "--admin-tls needs --admin-listen HOST:PORT" in refusal(*tls(server), "--admin-listen", "unix:/tmp/none")
    assert "asks for a token" in refusal(*tls(server), "--admin-listen", "0.0.0.0:0")
