"""qkvctl size against a daemon: the bytes that it foretells are those that sessions take, within 5 %."""

import json
import subprocess

import pytest

from daemon import Daemon, binary, clean_environment, wait_for
from kv import FP16, Cache
from qkv.v1 import admin_pb2, admin_pb2_grpc, model_pb2
from qkv.v1 import kv_cache_pb2 as kv

SESSIONS = 6


def storage(daemon):
    return admin_pb2_grpc.AdminStub(daemon.channel()).GetStorage(admin_pb2.GetStorageRequest())


def size(*arguments, status=0):
    done = subprocess.run([binary("qkvctl"), "size", "--json", *map(str, arguments)], capture_output=True, text=True,
                          env=clean_environment(), check=False)
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout) if status == 0 else done.stderr


@pytest.mark.parametrize(("tokens", "layers", "kv_heads", "q_heads", "width", "bits"),
                         [(1000, 3, 2, 4, 64, 4), (4160, 4, 2, 8, 128, 2.5), (300, 12, 4, 4, 64, 8)])
def test_bytes_are_those_of_a_daemon(tmp_path, tokens, layers, kv_heads, q_heads, width, bits):
    foretold = size("--tokens", tokens, "--layers", layers, "--kv-heads", kv_heads, "--q-heads", q_heads, "--key-dim", width,
                    "--bits", bits, "--sessions", SESSIONS)
    with Daemon("--data-dir", str(tmp_path), "--calibrate-tokens", "0", "--ema-every", "1") as daemon:
        before = daemon.status().kv_bytes
        for number in range(SESSIONS):
            cache = Cache(daemon.stub(), f"s{number}", layers=layers, kv_heads=kv_heads, q_heads=q_heads,
                          key_dim=width, value_dim=width, dtype=FP16, bits_k=bits, bits_v=bits,
                          durability=kv.DURABILITY_ASYNC)
            rows = cache.rows(tokens)
            for layer in range(layers):
                for begin in range(0, tokens, 500):
                    part = [one[begin:begin + 500] for one in rows]
                    cache.append(begin, *part, layer=layer, dtype=FP16)
                cache.attend(tokens - 1, cache.queries(1), layer=layer)
        taken = daemon.status().kv_bytes - before
        print(f"memory: foretold {foretold['memory_bytes']}, taken {taken}")
        assert 0.95 < foretold["memory_bytes"] / taken < 1.05
        pages = SESSIONS * layers * ((tokens - 64) // 64)
        wait_for(lambda: storage(daemon).records >= pages, "the pages are not written")
        # Exact rows are there, too, until they are coded: what is foretold is of pages alone.
        exact = SESSIONS * layers * 2 * kv_heads * width * 2 * 128
        live = storage(daemon).live_bytes
        print(f"disk: foretold {foretold['stored_bytes']}, live {live}, of them exact rows at most {exact}")
        assert 0.95 * (live - exact) < foretold["stored_bytes"] < 1.05 * live


def test_a_model_of_the_daemon(tmp_path):
    with Daemon() as daemon:
        Cache(daemon.stub(), "s", layers=5, kv_heads=2, q_heads=4, key_dim=64, value_dim=64, dtype=FP16)
        asked = size("--model", "model-s", "--tokens", 640, "--target", daemon.target)
        given = size("--tokens", 640, "--layers", 5, "--kv-heads", 2, "--q-heads", 4, "--key-dim", 64)
        assert asked["session_bytes"] == given["session_bytes"]
        policy = model_pb2.CodecPolicy(codec="kivi", codec_v="turboquant", bits_k=4, bits_v=2, kivi=model_pb2.Kivi(q_group_size=64))
        Cache(daemon.stub(), "two", layers=5, kv_heads=2, q_heads=4, key_dim=64, value_dim=64, dtype=FP16, policy=policy)
        two = size("--model", "model-two", "--tokens", 6400, "--target", daemon.target)
        alike = size("--model", "model-two", "--codec", "kivi", "--tokens", 6400, "--target", daemon.target)
        # Bits a coordinate, with scales: 4.5 of keys and 2.25 of values, or 5 and 3.
        assert 0.75 < two["session_bytes"] / alike["session_bytes"] < 0.92


def test_what_is_missing_is_named():
    assert "--tokens" in size("--layers", 1, status=2)
    assert "--kv-heads" in size("--layers", 1, "--tokens", 100, status=2)
    assert "codec is \"none\"" in size("--layers", 1, "--kv-heads", 1, "--key-dim", 64, "--tokens", 1, "--codec", "none",
                                       status=2)
    assert "bits" in size("--layers", 1, "--kv-heads", 1, "--key-dim", 64, "--tokens", 1, "--bits", 3.3, status=2)


def test_cores_follow_the_rates():
    numbers = ["--tokens", 512, "--layers", 2, "--kv-heads", 2, "--key-dim", 64]
    busy = size(*numbers, "--appends-per-second", 1000, "--steps-per-second", 100)
    expected = 1000 * busy["append_seconds_per_token"] + 100 * busy["attend_seconds_per_step"]
    assert busy["cores"] == pytest.approx(expected, rel=1e-3) and busy["cores"] > 0
    assert size(*numbers)["cores"] == 0
