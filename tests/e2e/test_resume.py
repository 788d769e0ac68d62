"""qkvctl copy and load: where they go on, where they refuse to, and what a signal leaves behind."""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import threading

import grpc
import pytest

from daemon import PATIENCE, Daemon, binary, clean_environment, wait_for
from kv import FP16, FP32, TIMEOUT, Cache, refused
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2
from test_cli import json_lines, run
from test_coded import Moved, assert_same


@pytest.fixture(scope="module")
def other():
    with Daemon() as running:
        yield running


def fill(cache, tokens, begin=0):
    for layer in range(3):
        cache.append(begin, *cache.rows(tokens), layer=layer)


def truncate(cache, position):
    cache.stub.Truncate(kv.TruncateRequest(session=cache.name, position=position), timeout=TIMEOUT)


def save(daemon, cache, path):
    json_lines("qkvctl", "fetch", cache.name, "--coded", "--output", path, "--target", daemon.target)


# ---- Without token ids ----


@pytest.fixture(params=[0, 3], ids=["attend", "exact"])
def cache(request, daemon, make_cache):
    """Rows without ids: 3 pages of each layer and some exact ones; or exact ones alone."""
    made = make_cache(layers=3, dtype=FP16, recent_window=4096 if request.param else 20)
    fill(made, 250)
    return made


@pytest.fixture(params=["copy", "load"])
def bring(request, daemon, cache, other, tmp_path):
    """Brings what the session has now to the other daemon."""

    def command(tool):
        if request.param == "copy":
            return tool("qkvctl", "copy", cache.name, "--to", other.target, "--target", daemon.target)
        path = str(tmp_path / "session.qkvs")
        save(daemon, cache, path)
        return tool("qkvctl", "load", path, "--target", other.target)

    yield command
    with contextlib.suppress(grpc.RpcError):
        other.stub().CloseSession(kv.CloseSessionRequest(session=cache.name), timeout=TIMEOUT)


def test_what_is_the_same_goes_on(cache, other, bring):
    moved = Moved(cache, other)
    bring(json_lines)
    for position in 192, 64:
        truncate(moved, position)
        assert bring(json_lines)[0]["rows"] == 3 * (250 - position)
        assert_same(cache, moved)


def refused_copy(bring, moved, text):
    """What is said where nothing of the target changes."""
    before = moved.state()
    result = bring(run)
    assert result.returncode == 1 and text in result.stderr, result
    assert moved.state() == before
    return result.stderr


@pytest.mark.parametrize("kept", [192, 64, 0])
def test_other_rows_are_not_continued(cache, other, bring, kept):
    """The session was truncated and has gone on with other tokens: the target's rows are not its own any more."""
    moved = Moved(cache, other)
    bring(json_lines)
    truncate(cache, kept)
    fill(cache, 300, begin=kept)
    coded = moved.info().tokens_coded > 0
    if coded:  # the newest rows are exact there, and a page at the source
        assert "has exact rows at position 249" in refused_copy(bring, moved, "truncate the target to 192 and")
        truncate(moved, 192)
    if not coded or kept < 192:
        said = refused_copy(bring, moved, "truncate it to 0, or close it")
        assert f"session {cache.name} has other rows at position {191 if coded else 249}" in said
        truncate(moved, kept)
    bring(json_lines)
    assert_same(cache, moved)


def test_one_that_has_more_is_no_copy(cache, other, bring):
    moved = Moved(cache, other)
    bring(json_lines)
    fill(moved, 70, begin=250)
    result = bring(run)
    assert result.returncode == 1
    assert "has 320 positions in layer 0, the source has 250" in result.stderr


def test_rows_that_have_become_pages(daemon, make_cache, other):
    """What was sent as exact rows is a page at the source now: it says where to begin anew."""
    made = make_cache(layers=3, dtype=FP16, recent_window=20)
    moved = Moved(made, other)
    command = ["copy", made.name, "--to", other.target, "--target", daemon.target]
    fill(made, 250)
    json_lines("qkvctl", *command)
    fill(made, 250, begin=250)
    result = run("qkvctl", *command)
    assert result.returncode == 1 and "truncate the target to 192" in result.stderr
    truncate(moved, 192)
    json_lines("qkvctl", *command)
    assert_same(made, moved)


# ---- Signals ----


class Relay:
    """A way to a daemon that stops after so many bytes, until it is told to go on."""

    def __init__(self, daemon, most):
        self.most, self.stopped, self.go_on = most, threading.Event(), threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.target = "127.0.0.1:%d" % self.listener.getsockname()[1]
        self.daemon = tuple(daemon.tcp.rsplit(":", 1))
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                near, far = self.listener.accept()[0], socket.create_connection(self.daemon)
                for pair in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self.pump, args=pair, daemon=True).start()

    def pump(self, source, to, counted):
        count = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                to.sendall(data)
                count += len(data)
                if counted and count > self.most:
                    self.stopped.set()
                    self.go_on.wait(PATIENCE)
        with contextlib.suppress(OSError):
            to.shutdown(socket.SHUT_RDWR)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.go_on.set()
        self.listener.close()


def interrupt(relay, number, *arguments):
    """qkvctl that gets a signal in the middle of what it sends; the relay then goes on."""
    process = subprocess.Popen([binary("qkvctl"), *arguments], env=clean_environment(), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    wait_for(lambda: relay.stopped.is_set() or process.poll() is not None, "nothing is sent")
    process.send_signal(number)
    relay.go_on.set()
    out, said = process.communicate(timeout=PATIENCE)
    assert out == ""
    return process.returncode, said


def rows_file(path, tokens):
    size = tokens * 2 * 64 * 4
    header = json.dumps({f"layers.0.{part}": {"dtype": "F32", "shape": [tokens, 2, 64], "data_offsets": place}
                         for part, place in (("k", (0, size)), ("v", (size, 2 * size)))})
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(2 * size))
    return str(path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_load_of_rows_leaves_nothing(other, tmp_path, number):
    model = {"name": "wide", "layers": 1, "kv_heads": 2, "q_heads": 2, "key_dim": 64, "value_dim": 64, "dtype": FP32}
    other.stub().RegisterModel(model_pb2.RegisterModelRequest(model=model), timeout=TIMEOUT)
    path = rows_file(tmp_path / "rows.safetensors", 32768)  # four appends
    with Relay(other, 1 << 20) as relay:
        code, said = interrupt(relay, number, "load", path, "--session", "rows", "--model", "wide", "--target",
                               relay.target)
    assert code == 1 and "interrupted (the session was closed again)" in said
    with refused(grpc.StatusCode.NOT_FOUND):
        other.stub().GetSession(kv.GetSessionRequest(session="rows"), timeout=TIMEOUT)


@pytest.fixture(scope="module")
def large(daemon):
    """Some MiB of pages in each of its layers."""
    made = Cache(daemon.stub(), "large", layers=3, kv_heads=8, q_heads=8, key_dim=64, value_dim=64, dtype=FP16)
    fill(made, 8192)
    return made


@pytest.mark.parametrize("way", ["copy", "load"])
def test_an_interrupted_copy_goes_on(daemon, other, large, tmp_path, way):
    path = str(tmp_path / "session.qkvs")
    save(daemon, large, path)
    moved = Moved(large, other)
    with Relay(other, 1 << 20) as relay:
        command = {
            "copy": ["copy", large.name, "--target", daemon.target, "--to"], "load": ["load", path, "--target"],
        }[way]
        code, said = interrupt(relay, signal.SIGINT, *command, relay.target)
        assert code == 1 and "interrupted (what has arrived stays in session large" in said
        assert "the same command goes on from there" in said
        assert 0 < sum(moved.info().lengths) < sum(large.info().lengths)
        json_lines("qkvctl", *command, other.target)
    assert_same(large, moved)
    other.stub().CloseSession(kv.CloseSessionRequest(session=large.name), timeout=TIMEOUT)


@pytest.mark.parametrize("more", [["--coded"], [], ["--format", "npy"]], ids=["coded", "safetensors", "npy"])
def test_an_interrupted_fetch_leaves_nothing(daemon, large, tmp_path, more):
    output = str(tmp_path / "out")
    process = subprocess.Popen([binary("qkvctl"), "fetch", large.name, "--output", output, *more, "--target",
                                daemon.target], env=clean_environment(), stderr=subprocess.PIPE, text=True)
    wait_for(lambda: os.listdir(tmp_path) != [] or process.poll() is not None, "nothing is fetched")
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=PATIENCE)[1]
    if process.returncode == 1:  # else it was quicker
        assert "interrupted" in said and os.listdir(tmp_path) == []
    else:
        assert process.returncode == 0 and os.listdir(tmp_path) == ["out"]
