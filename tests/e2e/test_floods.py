"""Each attack of tests/attacks, for a moment: others are served, memory stays bounded, and the client that floods is cut off.

Bounds of time are for a busy machine: without limits of frames, a flood stops all others for as long as it lasts.
tests/attacks/measure.py measures what is left.
"""

import os
import socket
import ssl
import subprocess
import sys
import time

import pytest

sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "attacks"))

from attackers import ATTACKS, CONTROL, memory_bound  # noqa: E402
from daemon import PATIENCE, SANITIZED, Daemon, wait_for  # noqa: E402
from http2 import (CONTINUATION, END_HEADERS, HEADERS, INITIAL_WINDOW_SIZE, PING, PREFACE, RST_STREAM, Raw, data,  # noqa: E402
                   frame, head, header, request, setting)
from kv import Cache, Tenant  # noqa: E402
from victim import MIB, Attacker, Victim  # noqa: E402

HEADERS_CLOSED, FRAMES_CLOSED, MESSAGES_CLOSED = (f"qkvd_connections_closed_{what}_total"
                                                  for what in ("headers", "frames", "messages"))
PAUSES = "qkvd_connection_pauses_total"
CUT_OFF = {
    "oversized headers": HEADERS_CLOSED,
    "continuations": HEADERS_CLOSED,
    "many headers": FRAMES_CLOSED,
    "windows": FRAMES_CLOSED,
    "rapid reset": FRAMES_CLOSED,
    "settings": FRAMES_CLOSED,
    "pings": PAUSES,  # which drain as fast as a paused connection is read
    "half messages": PAUSES,
}
MESSAGES = {
    HEADERS_CLOSED: "a connection is closed: its header block is too long",
    FRAMES_CLOSED: "a connection is closed: it sends too many control frames",
    MESSAGES_CLOSED: "a connection is closed: it holds the most bytes of messages that are not whole",
}
# Without it one tenant's calls that go on take all places.
OPTIONS = {"unread answers": ("--limit-tenant-calls", "512")}
# What says that an attack is under way, and from when on.
UNDER_WAY = {"messages ahead": 700, "streams that go on": 700}
# So many new connections at once may take the place of a call whose message is on its way.
FAILURES_MAX = {"half-open calls, 10000 connections": 20}
LONGEST_S = 5
APPEND, ATTEND = "/qkv.v1.KvCache/Append", "/qkv.v1.KvCache/Attend"
CANCEL = b"\0\0\0\x08"


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != CONTROL])
def test_others_are_served(name):
    with Daemon(*OPTIONS.get(name, ())) as daemon:
        victim = Victim(daemon)
        before = daemon.rss_bytes()
        with Attacker(daemon, name):
            if name in UNDER_WAY:
                wait_for(lambda: daemon.metric("qkvd_calls_running") >= UNDER_WAY[name], "the attack does not begin")
            seen = victim.look(1)
            metric = CUT_OFF.get(name)
            if metric:
                wait_for(lambda: daemon.metric(metric) > 0, "the attack is not cut off")
        print(seen)
        assert len(seen.failures) <= FAILURES_MAX.get(name, 0), seen.failures
        assert max(seen.checks) < LONGEST_S and max(seen.decodes) < LONGEST_S
        assert SANITIZED or seen.rss < before + memory_bound(name) * MIB
        if metric in MESSAGES:
            assert [line["message"] for line in daemon.log_lines() if "closed" in line["message"]] == [MESSAGES[metric]]


def test_half_messages_end_no_others():
    """Another client's appends go on while messages that are never finished fill what memory there is for them."""
    with Daemon() as daemon:
        cache = Cache(Tenant(daemon.stub(daemon.tcp), "victim"), "s", layers=1, kv_heads=8, q_heads=8, key_dim=128, value_dim=128)
        rows, position = cache.rows(256), 0
        with Attacker(daemon, "half messages"):
            until = time.monotonic() + PATIENCE
            while position < 100 * 256 or daemon.metric(PAUSES) < 100:
                cache.append(position, *rows)  # raises where it fails
                position += 256
                assert time.monotonic() < until, "the attack is not slowed down"


def test_half_messages_are_read_slowly():
    """A connection that holds most of what messages that are not whole may have is slowed down, and not closed at once.
    Another client's message that needs more than is left is read, and then it is closed."""
    with Daemon() as daemon:
        cache = Cache(Tenant(daemon.stub(daemon.tcp), "victim"), "s", layers=1, kv_heads=8, q_heads=8, key_dim=128, value_dim=128)
        before = daemon.rss_bytes()
        raw = Raw(daemon.tcp)
        raw.greet((INITIAL_WINDOW_SIZE, 1 << 20))
        for stream in range(1, 9, 2):
            raw.send(frame(HEADERS, END_HEADERS, stream, request(APPEND)))
        for stream in range(1, 7, 2):
            assert raw.upload(stream, 60 << 20, 59 << 20, 30) == 59 << 20
        pauses = daemon.metric(PAUSES)
        begun = time.monotonic()
        assert raw.upload(7, 60 << 20, 28 << 20, 30) == 28 << 20
        assert time.monotonic() - begun > 0.5 and daemon.metric(PAUSES) > pauses + 100  # 13 MiB, 32 KiB in 5 ms
        wait_for(lambda: daemon.metric("qkvd_request_bytes") >= (3 * 59 + 28) * MIB, "what was sent is not read")
        assert daemon.metric(MESSAGES_CLOSED) == 0
        assert SANITIZED or daemon.rss_bytes() < before + 256 * MIB
        cache.append(0, *cache.rows(7168))  # 56 MiB
        assert daemon.metric(MESSAGES_CLOSED) == 1
        assert SANITIZED or daemon.rss_bytes() < before + 512 * MIB
        raw.close()


def test_messages_of_calls_that_have_ended():
    """What the daemon has refused midway counts no longer: 30 times 20 MiB of one connection are more than 256 MiB."""
    with Daemon("--limit-first-message", "200ms") as daemon:
        raw = Raw(daemon.tcp)
        raw.greet((INITIAL_WINDOW_SIZE, 1 << 20))
        for stream in range(1, 61, 2):
            raw.send(frame(HEADERS, END_HEADERS, stream, request(APPEND)))
            sent = raw.upload(stream, 60 << 20, 20 << 20, 0.2)
            ended = (stream + 1) // 2
            wait_for(lambda: raw.closed or daemon.metric("qkvd_calls_silent_total") >= ended, "the call is not ended")
            assert not raw.closed and sent > 0
        assert daemon.metric(MESSAGES_CLOSED) == 0
        raw.close()


def resets(count):
    block = request(ATTEND)
    return b"".join(frame(HEADERS, END_HEADERS, stream, block) + frame(RST_STREAM, 0, stream, CANCEL)
                    for stream in range(1, 2 * count, 2))


def block_without_end(pieces):
    piece = header("x-more", "v" * 16000)
    return frame(HEADERS, 0, 1, request(ATTEND)) + frame(CONTINUATION, 0, 1, piece) * pieces


def test_limit_of_frames():
    """A connection below the limit stays, one above is closed, and 0 is no limit."""
    for limit, count, closed in (("1000", 1200, False), ("100", 200, True), ("0", 5000, False)):
        with Daemon("--limit-control-frames", limit) as daemon:
            raw = Raw(daemon.tcp)
            raw.greet()
            raw.send(resets(count) + frame(PING, 0, 0, b"whatever"))
            wait_for(lambda: raw.closed or b"whatever" in raw.received, "neither closed nor answered")
            assert raw.closed == closed
            assert (daemon.metric(FRAMES_CLOSED) == 1) == closed
            raw.close()


def test_limit_of_frames_follows_the_peer():
    """Who is cut off and connects again has a fifth of the limit left, which is enough for ordinary calls; others have all of it."""
    with Daemon("--limit-control-frames", "100") as daemon:
        def closed_after(count, source):
            raw = Raw(daemon.tcp, source=source)
            raw.greet()
            raw.send(resets(count) + frame(PING, 0, 0, b"whatever"))
            wait_for(lambda: raw.closed or b"whatever" in raw.received, "neither closed nor answered")
            raw.close()
            return raw.closed and b"whatever" not in raw.received

        assert not closed_after(120, "127.0.0.2")
        assert closed_after(200, "127.0.0.3")
        for _ in range(3):
            assert closed_after(120, "127.0.0.3")
        assert not closed_after(10, "127.0.0.3")
        assert not closed_after(120, "127.0.0.4")
        assert daemon.metric(FRAMES_CLOSED) == 4


def test_connections_of_a_peer_that_comes_again():
    """They are accepted more slowly than others: 16 in 20 ms, once they have half of the points that close one."""
    with Daemon("--limit-control-frames", "100") as daemon:
        host, port = daemon.tcp.rsplit(":", 1)

        def seconds(count, sources):
            held, begun = [], time.monotonic()
            for i in range(count):
                source = f"127.0.{sources}.{1 + i // 20 if sources != 3 else 1}", 0
                held.append(socket.create_connection((host, int(port)), timeout=PATIENCE, source_address=source))
                held[-1].sendall(PREFACE + setting())
            assert held[-1].recv(1)  # the daemon greets, too
            took = time.monotonic() - begun
            for connection in held:
                connection.close()
            return took

        others = min(seconds(1200, 2), seconds(1200, 4))  # a busy machine delays one of them
        assert seconds(1200, 3) > others + 0.4  # of 1.1 s


def test_pauses():
    """A connection near the limit is read slowly: what it may do in a second is a small part of a processor's."""
    with Daemon() as daemon:
        raw = Raw(daemon.tcp)
        raw.greet()
        raw.send(resets(1300) + frame(PING, 0, 0, b"whatever"))
        wait_for(lambda: b"whatever" in raw.received, "not answered")
        assert daemon.metric(PAUSES) > 10
        raw.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    paths = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                    "-subj", "/CN=localhost", "-out", paths[0], "-keyout", paths[1]], check=True, capture_output=True)
    return paths


def connect_encrypted(daemon, certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(certificate[0])
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    host, port = daemon.tcp.rsplit(":", 1)
    return context.wrap_socket(socket.create_connection((host, int(port)), timeout=PATIENCE))


@pytest.mark.parametrize("sent, metric", [(block_without_end(6), HEADERS_CLOSED), (resets(3000), FRAMES_CLOSED)],
                         ids=["header block", "resets"])
def test_encrypted(certificate, sent, metric):
    """What is encrypted is counted, too."""
    with Daemon("--tls-cert", certificate[0], "--tls-key", certificate[1]) as daemon:
        with connect_encrypted(daemon, certificate) as connection:
            try:
                connection.sendall(PREFACE + setting() + sent)
                while connection.recv(65536):
                    pass
            except OSError:
                pass
        wait_for(lambda: daemon.metric(metric) == 1, "it is not counted")
        assert [line["message"] for line in daemon.log_lines() if "closed" in line["message"]] == [MESSAGES[metric]]


def test_key_updates(certificate):
    """TLS messages that have no data are counted: OpenSSL reads on while they come."""
    with Daemon("--tls-cert", certificate[0], "--tls-key", certificate[1]) as daemon:
        command = ["openssl", "s_client", "-connect", daemon.tcp, "-alpn", "h2", "-tls1_3", "-CAfile", certificate[0]]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              bufsize=0) as client:
            try:
                client.stdin.write(PREFACE + setting())
                for _ in range(5):  # as many as an honest client never sends
                    time.sleep(0.05)
                    client.stdin.write(b"k\n")
                assert daemon.metric(FRAMES_CLOSED) == 0 and client.poll() is None
                for _ in range(2000):
                    time.sleep(0.002)
                    client.stdin.write(b"k\n")
                    if client.poll() is not None:
                        break
            except OSError:
                pass
            client.kill()
        wait_for(lambda: daemon.metric(FRAMES_CLOSED) == 1, "it is not counted")


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_messages_under_way(certificate, encrypted):
    """They count until the call ends, by its client, by the daemon, or with its connection."""
    options = ("--tls-cert", certificate[0], "--tls-key", certificate[1]) if encrypted else ()
    with Daemon(*options, "--limit-first-message", "1s") as daemon:
        host, port = daemon.tcp.rsplit(":", 1)

        def connect():
            made = connect_encrypted(daemon, certificate) if encrypted else socket.create_connection((host, int(port)))
            made.sendall(PREFACE + setting())
            return made

        def begin(connection, stream):
            connection.sendall(frame(HEADERS, END_HEADERS, stream, request(APPEND)) + data(stream, head(50000) + bytes(20000)))

        def wait_held(count):
            wait_for(lambda: daemon.metric("qkvd_request_bytes") == count, f"{count} bytes are not held")

        with connect() as first, connect() as second:
            begin(first, 1)
            begin(second, 1)
            wait_held(40010)
            first.sendall(frame(RST_STREAM, 0, 1, CANCEL))
            wait_held(20005)
            wait_held(0)  # limit-first-message
            begin(second, 3)
            wait_held(20005)
        wait_held(0)
