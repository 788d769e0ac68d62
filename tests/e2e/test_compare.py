"""qkvctl compare: codecs on a session's own rows."""

import os

import grpc
import numpy as np
import pytest

from daemon import SANITIZED, Daemon
from kv import TIMEOUT, Cache, refused
from qkv.v1 import admin_pb2, admin_pb2_grpc, model_pb2
from test_cli import DATA, json_lines, run

CODECS = {"embedded", "kivi", "turboquant", "turboquant-ip", "polarquant", "running-u8", "pq", "int8", "commvq",
          "turboquant-outliers", "turboquant-ip-outliers", "turboquant-low-rank", "kivi-low-rank", "turboquant-delta", "int8-delta",
          "polarquant-low-rank", "int8-low-rank", "running-u8-low-rank", "kivi-delta", "polarquant-delta", "turboquant-outliers-delta",
          "ecsq"}
CALIBRATED = {"embedded", "commvq", "ecsq", "pq", "turboquant-outliers", "turboquant-ip-outliers", "turboquant-outliers-delta"}


def filled(make_cache, tokens=500, **fields):
    cache = make_cache(key_dim=64, value_dim=32, rope=model_pb2.Rope(theta=10000), **fields)
    for layer in range(cache.model.layers):
        cache.append(0, *cache.rows(tokens), layer=layer)
    return cache


def compare(daemon, cache):
    [found] = json_lines("qkvctl", "compare", cache.name, "--timeout", "5m", "--target", daemon.target)
    assert found["session"] == cache.name
    return found, {(row["codec"], row["bits"]): row for row in found["codecs"]}


def test_every_codec_has_rows(daemon, make_cache):
    cache = filled(make_cache, layers=6, recent_window=300)
    before, rows_before = cache.info(), cache.fetch((0,))
    found, rows = compare(daemon, cache)
    # Four pages of each of four layers, from the exact tail.
    assert found["layers"] == 4 and found["tokens"] == found["tokens_exact"] == 4 * 256
    assert {codec for codec, _ in rows} == CODECS
    for (codec, bits), row in rows.items():
        assert row["calibrated"] is False
        assert bits - (0.75 if "outliers" in codec else 0) < row["bits_per_coordinate"] < bits + (3 if "low-rank" in codec else 2)
        expected = row["bits_per_coordinate"] / 8 * cache.model.layers * cache.model.kv_heads * (64 + 32)
        assert row["bytes_per_token"] == pytest.approx(expected, rel=1e-6)
        fewer = rows.get((codec, bits / 2))
        assert 0 < row["attention_error"] < (fewer["attention_error"] if fewer else 1.5)
    assert rows["pq", 2]["attention_error"] < rows["turboquant", 2]["attention_error"] < rows["turboquant-ip", 2]["attention_error"]
    assert rows["running-u8", 8]["attention_error"] < 0.02
    after = cache.info()
    assert (after.bytes_coded, after.bytes_exact, list(after.lengths)) == (before.bytes_coded, before.bytes_exact, list(before.lengths))
    assert all(np.array_equal(a, b) for a, b in zip(cache.fetch((0,)), rows_before))


def test_what_it_takes_is_what_a_session_takes(daemon, make_cache):
    cache = filled(make_cache, tokens=512, layers=2, recent_window=0, policy=model_pb2.CodecPolicy(codec="kivi", bits_k=4, bits_v=4))
    found, rows = compare(daemon, cache)
    assert found["tokens_exact"] == 0
    info = cache.info()
    assert rows["kivi", 4]["bits_per_coordinate"] == pytest.approx(info.bits_per_coordinate, rel=1e-6)
    # Rows that have been decoded from these codes are coded again at hardly any loss.
    assert rows["kivi", 4]["attention_error"] < 0.01 < rows["turboquant", 4]["attention_error"]


def test_table(daemon, make_cache):
    cache = filled(make_cache, layers=1)
    text = run("qkvctl", "compare", cache.name, "--target", daemon.target).stdout
    assert "CODEC" in text and "turboquant-ip" in text and f"{cache.name}: " in text


def test_sessions_with_nothing_to_compare(daemon, make_cache):
    admin = admin_pb2_grpc.AdminStub(daemon.channel())
    with refused(grpc.StatusCode.NOT_FOUND):
        admin.Compare(admin_pb2.CompareRequest(session="nobody"), timeout=TIMEOUT)
    with refused(grpc.StatusCode.INVALID_ARGUMENT):
        admin.Compare(admin_pb2.CompareRequest(), timeout=TIMEOUT)
    cache = filled(make_cache, layers=1, tokens=63)
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "less than 64 tokens in memory"):
        admin.Compare(admin_pb2.CompareRequest(session=cache.name), timeout=TIMEOUT)


def test_one_at_a_time():
    with Daemon() as daemon:
        cache = filled(lambda **fields: Cache(daemon.stub(), "large", **fields), layers=8, kv_heads=8, q_heads=8)
        admin = admin_pb2_grpc.AdminStub(daemon.channel())
        request = admin_pb2.CompareRequest(session=cache.name)
        calls = [admin.Compare.future(request, timeout=TIMEOUT) for _ in range(4)]
        codes = [call.code() for call in calls]
        assert codes.count(grpc.StatusCode.OK) >= 1
        assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) >= 1
        # It is attended meanwhile, and a call that nobody waits for any more leaves the place to the next.
        left = admin.Compare.future(request, timeout=TIMEOUT)
        out, _ = cache.attend(499, np.ones((1, cache.q_heads, 64), np.float32))
        left.cancel()
        assert np.isfinite(out).all()
        while True:
            try:
                assert len(admin.Compare(request, timeout=TIMEOUT).codecs) > len(CODECS)
                break
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.skipif(SANITIZED, reason="trains codebooks of a whole model, minutes with sanitizers")
def test_a_model_that_is_calibrated(tmp_path):
    """A model's own rows: what its calibration gains shows."""
    calibration, prompt = str(tmp_path / "t.qkvc"), tmp_path / "prompt.txt"
    with open(os.path.join(DATA, "heldout_kjv.txt"), "rb") as text:
        prompt.write_bytes(text.read(1000))
    json_lines("qkv-worker", "calibrate", "--model", DATA, "--text", os.path.join(DATA, "calibration.txt"), "--output", calibration)
    with Daemon("--calibration", f"tinylm={calibration}", "--trust-calibration") as daemon:
        json_lines("qkv-worker", "generate", "--model", DATA, "--prompt", str(prompt), "--tokens", "10", "--bits", "8",
                   "--session", "real", "--keep", "--target", daemon.target)
        [found] = json_lines("qkvctl", "compare", "real", "--target", daemon.target, "--timeout", "200s")
    rows = {(row["codec"], row["bits"]): row for row in found["codecs"]}
    assert all(row["calibrated"] == (codec in CALIBRATED) for (codec, _), row in rows.items())
    for bits in (2, 3, 4):
        assert rows["embedded", bits]["attention_error"] < rows["turboquant", bits]["attention_error"]
