"""qkvctl demote, promote and session --map, and what a daemon does to tiers by itself, as people see it."""

import json
import os
import pty
import re
import subprocess
import time

import grpc
import numpy as np
import pytest

from daemon import SANITIZED, Daemon, binary, clean_environment, wait_for
from kv import TIMEOUT, Cache, refused
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import tensor_pb2

TOKENS = 448  # 6 pages below the window of 64


def run(*arguments):
    return subprocess.run([binary("qkvctl"), *arguments], env=clean_environment(), capture_output=True, text=True,
                          timeout=TIMEOUT, stdin=subprocess.DEVNULL)


def lines(*arguments):
    result = run(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def cache(make_cache):
    made = make_cache(layers=3, recent_window=64)
    for layer in range(3):
        k, v = made.rows(TOKENS)
        made.append(0, k, v, layer=layer)
        made.attend(TOKENS - 16, made.queries(16), layer=layer)
    return made


def test_demote_says_what_it_freed(daemon, cache):
    before = cache.info()
    (said,) = lines("demote", cache.name, "--bits", "2", "--even", "--layers", "0,2", "--begin", "64", "--end", "192",
                    "--target", daemon.target)
    after = cache.info()
    assert said["pages"] == 4
    assert said["bytes_freed"] == before.bytes_coded - after.bytes_coded > 0
    result = run("demote", cache.name, "--bits", "1.5", "--target", daemon.target)
    assert result.returncode == 0 and re.search(r"\d+ pages changed, .* freed", result.stdout)
    assert cache.info().bits_per_coordinate < after.bits_per_coordinate - 0.5
    cache.attend(TOKENS - 1, cache.queries(1), layer=1)


@pytest.mark.parametrize("arguments,code,text", [
    (["demote", "SESSION"], 2, "demote needs --bits BITS"),
    (["demote", "SESSION", "--bits", "0.3"], 1, "bits is 0.3, allowed are multiples of 0.125 up to 8"),
    (["demote", "nobody", "--bits", "2"], 1, "no session nobody"),
    (["demote", "SESSION", "--bits", "2", "--layers", "3"], 2, "the session has 0 to 2"),
    (["demote", "SESSION", "--bits", "2", "--begin", "9", "--end", "8"], 1, "range.begin is 9, at most range.end 8"),
    (["promote", "nobody"], 1, "no session nobody"),
    (["session", "nobody", "--map"], 1, "no session nobody"),
])
def test_what_cannot_be_is_refused(daemon, cache, arguments, code, text):
    before = cache.info().bytes_coded
    result = run(*[cache.name if word == "SESSION" else word for word in arguments], "--target", daemon.target)
    assert (result.returncode, result.stdout) == (code, "")
    assert text in result.stderr
    assert cache.info().bytes_coded == before


@pytest.mark.skipif(SANITIZED, reason="sanitizers keep freed memory")
def test_demotion_gives_memory_back_to_the_machine(name):
    """33 MB of codes at 8 bits, down to 1: what the daemon says it has freed the machine has."""
    with Daemon("--anchor", "none", "--calibrate-tokens", "0") as daemon:
        cache = Cache(daemon.stub(), name, layers=2, kv_heads=4, q_heads=4, key_dim=128, value_dim=128, recent_window=0,
                      bits_k=8, bits_v=8)
        k, v = cache.rows(1024)
        for layer in range(2):
            for position in range(0, 16384, 1024):
                cache.append(position, k, v, layer=layer)
        before, held = daemon.rss_bytes(), cache.info().bytes_coded
        assert held > 32 << 20
        (said,) = lines("demote", name, "--bits", "1", "--even", "--target", daemon.target)
        assert said["bytes_freed"] == held - cache.info().bytes_coded > 0.8 * held
        # or more: malloc gives back what it kept, too
        wait_for(lambda: before - daemon.rss_bytes() > 0.7 * said["bytes_freed"], "the memory is kept")


def test_thresholds_decide_in_the_background(name):
    """Of 448 tokens one gets nearly all attention, one 3 %, one 0.4 %, the others none."""
    with Daemon("--anchor", "none", "--ema-every", "1", "--tier-thresholds", "0.1,0.01,0.001") as daemon:
        cache = Cache(daemon.stub(), name, layers=1, recent_window=64)
        k, v = cache.rows(TOKENS)
        k[:] = 0.001 * k
        for token, score in ((200, 12), (300, 8.5), (120, 6.5)):
            k[token] = 0
            k[token, :, 0] = score
        queries = np.zeros((16, 4, 16), np.float32)
        queries[:, :, 0] = 4  # times the scale, 1 / 4
        cache.append(0, k, v)
        # What no query has met yet stays: planes that are dropped do not come back.
        time.sleep(1)
        stub = cache.stub
        before = list(stub.GetAttentionStats(kv.GetAttentionStatsRequest(session=name), timeout=TIMEOUT))
        assert len(before) == 2 and all(np.all(np.array(head.bits[:384]) == 4) for head in before)
        expected = np.ones(384)
        expected[0:16] = 4  # sinks
        expected[192:208], expected[288:304], expected[112:128] = 4, 3, 2
        deadline = time.monotonic() + TIMEOUT
        while True:
            cache.attend(TOKENS - 16, queries)
            heads = list(cache.stub.GetAttentionStats(kv.GetAttentionStatsRequest(session=name), timeout=TIMEOUT))
            if all(np.array_equal(head.bits[:384], expected) for head in heads):
                break
            assert time.monotonic() < deadline, [list(head.bits[:384:16]) for head in heads]
            time.sleep(0.05)
        assert len(heads) == 2
        for head in heads:
            assert head.ema[200] > 0.9 > 0.1 > head.ema[300] > 0.01 > head.ema[120] > 0.001 > head.ema[64]
        # The metric follows when the step is done.
        wait_for(lambda: daemon.metric("qkvd_tier_pages_total") >= 6, "the pages are not counted")


def test_promote_needs_what_was_kept(daemon, cache):
    assert run("demote", cache.name, "--bits", "2", "--target", daemon.target).returncode == 0
    result = run("promote", cache.name, "--target", daemon.target)
    assert result.returncode == 1 and "were not kept" in result.stderr


def test_promote_brings_back_what_was_kept(daemon, make_cache):
    cache = make_cache(layers=1, recent_window=64)
    name = cache.name + "-kept"
    cache.stub.OpenSession(kv.OpenSessionRequest(session=name, model=cache.model.name, keep_full=True),
                           timeout=TIMEOUT)
    cache.name = name
    k, v = cache.rows(TOKENS)
    cache.append(0, k, v)
    rows = [part.tobytes() for part in cache.fetch()]
    assert run("demote", name, "--bits", "1.5", "--even", "--target", daemon.target).returncode == 0
    assert [part.tobytes() for part in cache.fetch()] != rows
    (said,) = lines("promote", name, "--target", daemon.target)
    assert said["pages"] == 6
    assert [part.tobytes() for part in cache.fetch()] == rows


def test_map_in_numbers(daemon, cache):
    assert run("demote", cache.name, "--bits", "2", "--even", "--layers", "1", "--target",
               daemon.target).returncode == 0
    heads = lines("session", cache.name, "--map", "--target", daemon.target)
    assert [(head["layer"], head["kv_head"]) for head in heads] == [(layer, head) for layer in range(3)
                                                                   for head in range(2)]
    for head in heads:
        assert head["tokens"] == TOKENS and head["tokens_per_bucket"] == TOKENS // 64
        assert head["bits"][0] == (2 if head["layer"] == 1 else 4)
        assert head["bits"][-1] == 32  # exact rows, in fp32
        assert head["counted"] is True and head["queries"] == 16


def test_map_in_characters(daemon, cache):
    assert run("demote", cache.name, "--bits", "2", "--even", "--layers", "1", "--target",
               daemon.target).returncode == 0
    drawn = run("session", cache.name, "--map", "--target", daemon.target).stdout.splitlines()
    assert all(len(line) <= 80 for line in drawn)
    for layer in range(3):
        bits = "2" if layer == 1 else "4"
        assert re.fullmatch(rf"layer {layer} +{bits}+[#{bits}-9]?#+", drawn[layer]), drawn[layer]
    assert drawn[3].startswith("bits") and drawn[3].endswith("# exact  ~ on the SSD")
    assert "from position 0 on" in drawn[4]


def test_map_of_what_is_on_the_ssd(tmp_path):
    """It is no row of 0 bits; of a bucket with both the bits are those of what is in memory."""
    with Daemon("--data-dir", str(tmp_path / "data"), "--calibrate-tokens", "0", "--fold-after", "0") as daemon:
        cache = Cache(daemon.stub(), "s", layers=2, bits_k=4, bits_v=4, recent_window=0, durability=kv.DURABILITY_ASYNC)
        for layer in range(2):
            cache.append(0, *cache.rows(64 * 69), layer=layer)
        heads = lines("session", "s", "--map", "--target", daemon.target)
        assert all(head["cold"] == [0] * len(head["bits"]) for head in heads)
        cache.stub.CloseSession(kv.CloseSessionRequest(session="s", keep=True), timeout=TIMEOUT)
        request = kv.PrefetchRequest(session="s", range=tensor_pb2.TokenRange(begin=0, end=64 * 20), layers=[0])
        cache.stub.Prefetch(request, timeout=TIMEOUT)
        answers = list(cache.stub.GetAttentionStats(kv.GetAttentionStatsRequest(session="s", buckets=23), timeout=TIMEOUT))
        for answer in answers:
            held = 20 if answer.layer == 0 else 0  # pages, three of them a bucket
            assert np.allclose(answer.cold, [min(max(3 * i + 3 - held, 0), 3) / 3 for i in range(23)])
            assert np.allclose(answer.bits, [4 * (1 - cold) for cold in answer.cold], atol=0.01)
        drawn = run("session", "s", "--map", "--target", daemon.target).stdout.splitlines()
        assert re.fullmatch(r"layer 0 +4{20}~{49}", drawn[0]) and re.fullmatch(r"layer 1 +~{69}", drawn[1]), drawn
        heads = lines("session", "s", "--map", "--target", daemon.target)
        assert [head["cold"][0] for head in heads] == [0, 0, 1, 1]


def test_map_in_colours(daemon, cache):
    leader, follower = pty.openpty()
    with subprocess.Popen([binary("qkvctl"), "session", cache.name, "--map", "--target", daemon.target],
                          env=clean_environment(), stdout=follower, stdin=subprocess.DEVNULL) as process:
        os.close(follower)
        drawn = b""
        while True:
            try:
                piece = os.read(leader, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            drawn += piece
        assert process.wait(TIMEOUT) == 0
    os.close(leader)
    assert b"\x1b[48;5;34m \x1b[0m" in drawn  # 4 bits
    assert b"\x1b[48;5;250m#\x1b[0m" in drawn  # exact


def test_statistics_are_counted_among_responses(name):
    """What waits for a client that does not read has a limit."""
    with Daemon("--limit-response-bytes", "1MiB") as daemon:
        cache = Cache(daemon.stub(), name, layers=1, kv_heads=64, q_heads=64, key_dim=8, value_dim=8)
        cache.append(0, *cache.rows(2176))
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED,
                     "limit-response-bytes is 1048576 bytes, 0 are on their way, 1114112 more are needed"):
            list(cache.stub.GetAttentionStats(kv.GetAttentionStatsRequest(session=name), timeout=TIMEOUT))
        request = kv.GetAttentionStatsRequest(session=name, buckets=64)
        heads = list(cache.stub.GetAttentionStats(request, timeout=TIMEOUT))
        assert [head.kv_head for head in heads] == list(range(64))
        assert all(len(head.ema) == len(head.bits) == 64 and head.bits[0] == 4 for head in heads)
        wait_for(lambda: daemon.metric("qkvd_response_bytes") == 0, "statistics that have been sent are still counted")
