"""The command-line contract: qkvctl and qkv-worker as scripts use them."""

import contextlib
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import threading

import numpy as np
import pytest

from daemon import PATIENCE, SANITIZED, Daemon, binary, clean_environment
from kv import FP16, FP32, TIMEOUT
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2

DATA = os.path.join(os.path.dirname(__file__), "..", "data", "tinylm")


def run(tool, *arguments, **environment):
    return subprocess.run([binary(tool), *arguments], env=clean_environment(**environment), capture_output=True,
                          text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)


def json_lines(tool, *arguments, **more):
    """The objects of a --json call that succeeds; nothing else may be on stdout."""
    result = run(tool, *arguments, "--json", **more)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("tool", ["qkvctl", "qkv-worker", "qkv-bench"])
def test_help_and_version(tool):
    for argument in ("--help", "--version"):
        result = run(tool, argument)
        assert (result.returncode, result.stderr) == (0, "")
        assert tool in result.stdout
    assert re.search(r"\d+\.\d+\.\d+", run(tool, "--version").stdout)


COMMANDS = [("qkvctl", command) for command in ("status", "models", "sessions", "session", "match", "fork", "storage", "compare", "has", "watch", "fetch", "load", "copy", "sink", "rm")]
COMMANDS += [("qkv-worker", command) for command in ("generate", "score")]
COMMANDS += [("qkv-bench", command) for command in ("rpc", "append", "step", "fetch")]
IN_PROCESS = [("qkv-bench", command) for command in ("attend", "encode", "decode", "quality", "share", "share-append")]


@pytest.mark.parametrize("tool,command", COMMANDS + IN_PROCESS)
def test_help_of_every_command(tool, command):
    result = run(tool, command, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    for option in ("--json", "--help", "--version"):
        assert option in result.stdout
    assert ("--target" in result.stdout) == ((tool, command) in COMMANDS)
    assert command in run(tool, "--help").stdout


@pytest.mark.parametrize("tool,arguments,texts", [
    ("qkvctl", ["statsu"], ["statsu", "did you mean", "status"]),
    ("qkvctl", ["status", "--targt", "x"], ["--targt", "did you mean --target"]),
    ("qkvctl", ["session"], ["SESSION"]),
    ("qkvctl", ["status", "extra"], ["extra"]),
    ("qkvctl", [], ["usage"]),
    ("qkvctl", ["token", "new", "t", "--expires", "2027-13-01"], ["--expires is 2027-13-01, must be YYYY-MM-DD"]),
    ("qkvctl", ["token", "new", "t", "--expires", "2027-02-30"], ["--expires is 2027-02-30"]),
    ("qkvctl", ["match", "--tokens", "x"], ["match needs --model NAME"]),
    ("qkvctl", ["match", "--model", "x"], ["match needs --tokens FILE"]),
    ("qkvctl", ["fetch", "s", "--output", "\udcff"], ["--output is no UTF-8"]),  # the byte 0xff
    ("qkv-worker", ["generat"], ["generat", "did you mean", "generate"]),
    ("qkv-worker", ["generate", "--promt", "x"], ["--promt", "did you mean --prompt"]),
    ("qkv-worker", ["generate"], ["--model"]),
    ("qkv-worker", ["score", "--model", DATA], ["--text"]),
    ("qkv-bench", ["step", "--round", "3"], ["--round", "did you mean --rounds"]),
])
def test_wrong_usage(tool, arguments, texts):
    result = run(tool, *arguments)
    assert result.returncode == 2 and result.stdout == ""
    for text in texts:
        assert text in result.stderr, result.stderr


@pytest.mark.parametrize("tool,arguments", [
    ("qkvctl", ["status"]),
    ("qkv-worker", ["generate", "--model", DATA, "--prompt", os.path.join(DATA, "prompt.txt"), "--bytes", "1"]),
])
def test_no_daemon(tool, arguments, tmp_path):
    result = run(tool, *arguments, "--target", f"unix:{tmp_path}/none.sock", "--timeout", "2s")
    assert result.returncode == 1
    assert "none.sock" in result.stderr


def test_status_models_sessions(daemon, make_cache):
    cache = make_cache(recent_window=0)
    cache.append(0, *cache.rows(100))
    target = ["--target", daemon.target]
    (status,) = json_lines("qkvctl", "status", *target)
    assert status["state"] == "serving" and status["sessions"] >= 1 and status["kv_bytes"] > 0
    models = json_lines("qkvctl", "models", *target)
    assert cache.model.name in [model["model"] for model in models]
    sessions = json_lines("qkvctl", "sessions", *target)
    assert cache.name in [session["session"] for session in sessions]
    (session,) = json_lines("qkvctl", "session", cache.name, *target)
    assert session["lengths"] == [100, 0] and session["tokens_coded"] == 64
    for command in (["status"], ["models"], ["sessions"], ["session", cache.name]):
        result = run("qkvctl", *command, "--target", daemon.tcp)
        assert result.returncode == 0 and result.stdout and result.stderr == ""
        assert "\x1b" not in result.stdout  # no terminal, no colours
    assert run("qkvctl", "status", QKVD_TARGET=daemon.target).returncode == 0


def test_empty_variables_are_none(daemon):
    """Scripts pass on what they were given, which may be nothing."""
    empty = dict.fromkeys(("QKVD_TOKEN", "QKVD_TOKEN_FILE", "QKVD_TLS_CA", "QKVD_TLS_CERT", "QKVD_TLS_KEY", "QKVD_TENANT",
                           "QKVD_PLACEMENT", "QKVD_TARGET"), "")
    for name in empty:
        result = run("qkvctl", "status", "--target", daemon.target, **{name: ""})
        assert result.returncode == 0, (name, result.stderr)
    result = run("qkvctl", "status", "--timeout", "1s", **empty)
    assert "127.0.0.1:7580" in result.stderr or result.returncode == 0


def test_unknown_session(daemon, stub):
    result = run("qkvctl", "session", "nobody", "--target", daemon.target)
    assert result.returncode == 1 and result.stdout == ""
    assert "nobody" in result.stderr


def read_safetensors(path):
    """Arrays of the file by name; fp16 and fp32."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    types = {"F16": "<f2", "F32": "<f4"}
    header.pop("__metadata__", None)
    return {name: np.frombuffer(data[slice(*entry["data_offsets"])], types[entry["dtype"]]).reshape(entry["shape"])
            for name, entry in header.items()}


def test_fetch_load_and_remove(daemon, make_cache, tmp_path):
    cache = make_cache(layers=2, dtype=FP16, recent_window=1000)
    for layer in (0, 1):
        cache.append(0, *cache.rows(70), layer=layer)
    path = str(tmp_path / "rows.safetensors")
    target = ["--target", daemon.target]
    assert run("qkvctl", "fetch", cache.name, "--output", path, *target).returncode == 0
    arrays = read_safetensors(path)
    assert len(arrays) == 4
    for layer in (0, 1):
        for array, part in zip(cache.fetch(layers=(layer,)), "kv"):
            assert any(np.array_equal(np.asarray(found, np.float32).reshape(array.shape), array)
                       for found in arrays.values() if found.size == array.size), (layer, part)
    copy = f"{cache.name}-copy"
    result = run("qkvctl", "load", path, "--session", copy, "--model", cache.model.name, *target)
    assert result.returncode == 0, result.stderr
    again = str(tmp_path / "again.safetensors")
    assert run("qkvctl", "fetch", copy, "--output", again, *target).returncode == 0
    copied = read_safetensors(again)
    assert copied.keys() == arrays.keys()
    assert run("qkvctl", "rm", copy, *target).returncode == 0
    assert run("qkvctl", "rm", copy, *target).returncode == 1
    assert copy not in [s.session for s in cache.stub.ListSessions(kv.ListSessionsRequest(), timeout=TIMEOUT).sessions]


def test_load_names_layers_that_the_file_has_not(daemon, make_cache, tmp_path):
    cache = make_cache(layers=6, dtype=FP16)
    for layer in range(6):
        cache.append(0, *cache.rows(70), layer=layer)
    path, target = str(tmp_path / "rows.safetensors"), ["--target", daemon.target]
    for layers, missing, text in (("0-5", [], "0 rows of 6 layers, "), ("1", [0, 2, 3, 4, 5], " layers 0,2-5 of 0-5: they are empty"),
                                  ("0-3,5", [4], " layers 4 of 0-5: they are empty")):
        assert run("qkvctl", "fetch", cache.name, "--layers", layers, "--output", path, *target).returncode == 0
        copy = f"{cache.name}-copy"
        result = run("qkvctl", "load", path, "--session", copy, *target)
        assert result.returncode == 0 and text in result.stdout, result.stderr
        assert ("no rows" in result.stdout) == bool(missing)
        assert run("qkvctl", "rm", copy, *target).returncode == 0
        loaded, = json_lines("qkvctl", "load", path, "--session", copy, *target)
        assert loaded["missing_layers"] == missing and loaded["layers"] == 6 - len(missing)
        lengths = cache.stub.GetSession(kv.GetSessionRequest(session=copy), timeout=TIMEOUT).lengths
        assert [layer for layer in range(6) if lengths[layer] == 0] == missing
        assert run("qkvctl", "rm", copy, *target).returncode == 0


def test_fetch_cleans_up_after_a_failure(daemon, stub, tmp_path):
    result = run("qkvctl", "fetch", "nobody", "--output", str(tmp_path / "x.safetensors"), "--target", daemon.target)
    assert result.returncode == 1 and "nobody" in result.stderr
    assert os.listdir(tmp_path) == []
    result = run("qkvctl", "fetch", "nobody", "--output", "/no/such/folder/x.safetensors", "--target", daemon.target)
    assert result.returncode == 1


GENERATE = ["generate", "--model", DATA, "--prompt", os.path.join(DATA, "prompt.txt")]


def test_fetch_after_one_that_was_killed(daemon, make_cache, tmp_path):
    """What that has left does not get into the next one's directory."""
    cache = make_cache(layers=1, dtype=FP16)
    cache.append(0, *cache.rows(70))
    fetch = ["fetch", cache.name, "--format", "npy", "--target", daemon.target, "--output"]
    for name, left in (("a", "layers.7.k.npy"), ("b", "notes")):
        (tmp_path / f"{name}.partial").mkdir()
        (tmp_path / f"{name}.partial" / left).write_bytes(b"left")
    assert run("qkvctl", *fetch, str(tmp_path / "a")).returncode == 0
    assert sorted(os.listdir(tmp_path / "a")) == ["layers.0.k.npy", "layers.0.v.npy"]
    result = run("qkvctl", *fetch, str(tmp_path / "b"))
    assert result.returncode == 1 and "b.partial: File exists" in result.stderr
    assert os.listdir(tmp_path / "b.partial") == ["notes"]


def test_load_into_a_daemon_that_dies(tmp_path):
    """The session may be there again when the daemon is: it is not said to have been closed."""
    layer = 8192 * 2 * 64 * 4
    tensors = {"layers.0.k": (0, layer), "layers.0.v": (layer, 2 * layer)}
    header = json.dumps({name: {"dtype": "F32", "shape": [8192, 2, 64], "data_offsets": place}
                         for name, place in tensors.items()})
    path = tmp_path / "rows.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(2 * layer))
    with Daemon() as daemon, socket.create_server(("127.0.0.1", 0)) as listener:
        model = {"name": "m", "layers": 1, "kv_heads": 2, "q_heads": 2, "key_dim": 64, "value_dim": 64, "dtype": FP32}
        daemon.stub().RegisterModel(model_pb2.RegisterModelRequest(model=model), timeout=TIMEOUT)

        def relay():
            near, far = listener.accept()[0], socket.create_connection(tuple(daemon.tcp.rsplit(":", 1)))

            def back():
                with contextlib.suppress(OSError):
                    shutil.copyfileobj(far.makefile("rb", 0), near.makefile("wb", 0), 1)

            threading.Thread(target=back, daemon=True).start()
            count = 0
            while count < 1 << 20:
                data = near.recv(1 << 16)
                count += len(data)
                far.sendall(data)
            listener.close()
            daemon.kill()
            near.shutdown(socket.SHUT_RDWR)

        thread = threading.Thread(target=relay)
        thread.start()
        target = "127.0.0.1:%d" % listener.getsockname()[1]
        result = run("qkvctl", "load", str(path), "--session", "s", "--model", "m", "--timeout", "2s", "--target", target)
        thread.join()
        assert result.returncode == 1
        assert "session s is incomplete and still to be closed" in result.stderr


def test_generate_continues_the_prompt(daemon, stub):
    result = run("qkv-worker", *GENERATE, "--bytes", "40", "--bits-k", "8", "--bits-v", "8", "--target", daemon.target)
    assert result.returncode == 0, result.stderr
    with open(os.path.join(DATA, "greedy_continuation_160.txt")) as file:
        expected = file.read()
    assert expected[:20] in result.stdout
    assert daemon.status().sessions == 0 or not [
        s for s in stub.ListSessions(kv.ListSessionsRequest(), timeout=TIMEOUT).sessions if "tinylm" in s.model]


def test_generate_keeps_its_session_when_asked(daemon, stub):
    lines = json_lines("qkv-worker", *GENERATE, "--bytes", "8", "--session", "kept", "--keep", "--target", daemon.tcp)
    assert lines
    info = stub.GetSession(kv.GetSessionRequest(session="kept"), timeout=TIMEOUT)
    assert all(length >= 512 for length in info.lengths)
    assert info.tokens_coded > 0
    assert run("qkvctl", "rm", "kept", "--target", daemon.target).returncode == 0


def test_bench_attend_gives_the_promised_keys():
    shapes = [[], ["--calibrated", "--frame", "attend"], ["--low-share", "0.5", "--order", "linear", "--q-len", "3"],
              ["--frame", "archive", "--sessions", "2", "--threads", "2", "--value-dim", "32"],
              ["--cpu-mask", "none", "--precision", "1", "--anchor", "mean"]]
    for shape in shapes:
        figures = json_lines("qkv-bench", "attend", "--tokens", "256", "--dim", "64", "--kv-heads", "2", "--q-heads",
                             "8", "--repeats", "1", *shape)[-1]
        assert {"us", "code_bytes", "gbps", "raw_gbps", "fraction", "fp16_us", "fp32_us"} <= set(figures)
        assert all(figures[key] > 0 for key in ("us", "code_bytes", "gbps", "raw_gbps", "fraction", "fp16_us"))
        # Of rows and queries without any structure a little more than a tenth; tinylm: tests/client/bench/precision_test.c.
        assert 0 < figures["rel_err"] < (1e-5 if "--precision" in shape else 0.13 * figures["code_err"])
    failed = run("qkv-bench", "attend", "--frame", "attend")
    assert failed.returncode != 0 and "--calibrated" in failed.stderr


@pytest.mark.skipif(SANITIZED, reason="a thousand forks, minutes with sanitizers")
def test_share_gives_the_promised_keys():
    figures = json_lines("qkv-bench", "share", "--pages", "20000", "--tokens", "6400", "--rounds", "5", "--sessions", "2",
                         "--shared-tokens", "4096", "--dim", "64", "--kv-heads", "2", "--repeats", "1")[-1]
    assert figures["pages"] == 20000
    assert figures["match_none_us_p50"] < figures["match_us_p50"] <= figures["match_us_p99"]
    assert 48 < figures["index_bytes_per_page"] <= 64
    for group in ("g1", "g4"):
        ratio = figures[f"attend_us_{group}"] / figures[f"attend_apart_us_{group}"]
        assert abs(figures[f"attend_ratio_{group}"] - ratio) <= 1e-6 * ratio
    refused = run("qkv-bench", "share", "--shared-tokens", "5000")
    assert refused.returncode != 0 and "--shared-tokens is 5000" in refused.stderr


def test_share_append_takes_all_sealed_pages():
    figures = json_lines("qkv-bench", "share-append", "--tokens", "1024", "--dim", "64", "--repeats", "3")[-1]
    assert figures["pages_taken"] == 15 and 0 < figures["append_ratio"] < 1


def test_score_gives_the_promised_keys(daemon, stub):
    lines = json_lines("qkv-worker", "score", "--model", DATA, "--text", os.path.join(DATA, "heldout_kjv.txt"),
                       "--windows", "1", "--prefill", "192", "--length", "256", "--bits-k", "4", "--bits-v", "4",
                       "--target", daemon.target)
    figures = lines[-1]
    assert {"bits_per_byte", "bits_per_byte_exact", "kl_bits", "bits_per_coordinate", "kv_bytes", "kv_bytes_fp16",
            "attend_us_p50", "attend_us_p99"} <= set(figures)
    assert 0 <= figures["kl_bits"] < 0.01
    assert abs(figures["bits_per_byte"] - figures["bits_per_byte_exact"]) < 0.05
    assert 4 <= figures["bits_per_coordinate"] <= 4.5
    assert figures["kv_bytes"] < figures["kv_bytes_fp16"] / 3
    assert 0 < figures["attend_us_p50"] <= figures["attend_us_p99"]


def test_dump_is_what_quality_reads(tmp_path):
    """Rows and queries of a text: their error, and that of attention, is what other readers of the model have."""
    path = str(tmp_path / "rows.safetensors")
    text = os.path.join(DATA, "heldout_kjv.txt")
    (said,) = json_lines("qkv-worker", "dump", "--model", DATA, "--text", text, "--length", "384", "--output", path)
    assert (said["layers"], said["tokens"]) == (6, 384)
    setting = ("--setting", "plain:3", "--setting", "plain:8")
    figures = {row["scheme"]: row for row in json_lines("qkv-bench", "quality", "--dump", path, *setting)}
    coarse, fine = (figures[f"Hadamard + gain, no anchor, {bits}"] for bits in (3, 8))
    assert 0.02 < coarse["rel_mse_k"] < 0.04 and 0.02 < coarse["rel_mse_v"] < 0.04
    assert 0 < fine["attention_error"] < coarse["attention_error"] / 10 < 0.1
    # Codes of 2 bits have 1.9 bits of entropy in Gaussian coordinates.
    rows = {row["scheme"]: row for row in json_lines("qkv-bench", "entropy", "--dump", path, "--setting", "plain:2",
                                                     "--setting", "turboquant:2", "--setting", "int8:8")}
    for scheme in ("Hadamard + gain, no anchor, 2", "turboquant 2"):
        assert rows[scheme]["code_bits"] == 2
        assert 0.04 < rows[scheme]["one_table"] < 0.2 and 0 < rows[scheme]["adaptive_prior"] < 0.3
        assert 0 <= rows[scheme]["zstd_1"] < 0.3  # of whole images: headers, too
    assert rows["int8 8"]["one_table"] > 0.3
    refused = run("qkv-bench", "entropy", "--dump", path, "--setting", "turboquant-ip:2")
    assert refused.returncode == 1 and "codes of turboquant-ip are not measured" in refused.stderr
    for missing in (["--text", text], ["--output", path], ["--text", text, "--text", text, "--output", path]):
        assert run("qkv-worker", "dump", "--model", DATA, *missing).returncode == 2
    # They cross the wire in place of noise: whole pages of 2 heads of 64 + 64, as many as the bytes allow.
    for crossing in ("--store", "--coded"):
        (row,) = json_lines("qkv-bench", "fetch", crossing, "--calibrated", "--dump", path, "--bytes", "100000",
                            "--rounds", "2", "--repeats", "1")
        assert row["bytes"] == (195 if crossing == "--store" else 192) * 512 and row["gbps"] > 0
    refused = run("qkv-bench", "fetch", "--coded", "--dump", path + "x")
    assert refused.returncode == 1 and "rows.safetensorsx" in refused.stderr


@pytest.mark.parametrize("arguments,texts", [
    (["generate", "--model", "/no/such/model", "--prompt", os.path.join(DATA, "prompt.txt")], ["/no/such/model"]),
    (["generate", "--model", DATA, "--prompt", "/no/such/prompt"], ["/no/such/prompt"]),
    (["score", "--model", DATA, "--text", "/no/such/text"], ["/no/such/text"]),
])
def test_missing_files(daemon, stub, arguments, texts):
    result = run("qkv-worker", *arguments, "--target", daemon.target)
    assert result.returncode == 1
    for text in texts:
        assert text in result.stderr
