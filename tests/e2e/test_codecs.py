"""Each codec of parts through the real daemon: rows, attention, forks, files, the SSD and its limits."""

import copy
import os
import struct

import grpc
import numpy as np
import pytest

from daemon import SANITIZED, Daemon, wait_for
from kv import TIMEOUT, Cache, attention, refused
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2
from test_cli import DATA, json_lines
from test_coded import calibrate

LAYERS, TOKENS, WINDOW = 2, 500, 20
CODED = (TOKENS - WINDOW) // 64 * 64  # the first tokens, in pages
POLICY = model_pb2.CodecPolicy
# The policy, and the most that rows may be off, relative to their squares, of keys and of values.
CODECS = {
    "kivi": (POLICY(codec="kivi", bits_k=4, bits_v=4), 0.009, 0.009),
    "kivi-64": (POLICY(codec="kivi", bits_k=2, bits_v=8, kivi=model_pb2.Kivi(q_group_size=64)), 0.25, 1e-4),
    "turboquant": (POLICY(codec="turboquant", bits_k=4, bits_v=3), 0.0095, 0.035),
    "turboquant-dense": (POLICY(codec="turboquant", bits_k=3, bits_v=2,
                                turboquant=model_pb2.Turboquant(rotation=2)), 0.035, 0.12),
    "turboquant-ip": (POLICY(codec="turboquant-ip", bits_k=4, bits_v=4, turboquant_ip=model_pb2.Turboquant(rotation=2)),
                      0.055, 0.0095),
    "turboquant-outliers": (POLICY(codec="turboquant-outliers", bits_k=4, bits_v=2), 0.03, 0.31),
    "turboquant-ip-outliers": (POLICY(codec="turboquant-ip-outliers", bits_k=3, bits_v=3), 0.46, 0.1),
    "turboquant-outliers-8": (POLICY(codec="turboquant-outliers", bits_k=3, bits_v=2,
                                     turboquant_outliers=model_pb2.OutlierChannels(n_out=8)), 0.12, 0.4),
    "pq": (POLICY(codec="pq", bits_k=4, bits_v=2), 0.0095, 0.105),
    "commvq": (POLICY(codec="commvq", bits_k=2, bits_v=1), 0.13, 0.38),
    "int8": (POLICY(codec="int8", bits_k=8, bits_v=8), 5e-5, 5e-5),
    "polarquant": (POLICY(codec="polarquant", bits_k=3, bits_v=4), 0.035, 0.0098),
    "running-u8": (POLICY(codec="running-u8", bits_k=8, bits_v=8), 2e-4, 1e-4),
    "turboquant-low-rank": (POLICY(codec="turboquant-low-rank", bits_k=4, bits_v=2,
                                   low_rank_stage=model_pb2.LowRankStage(rank=8)), 0.0095, 0.12),
    "kivi-low-rank": (POLICY(codec="kivi-low-rank", bits_k=4, bits_v=4), 0.009, 0.009),
    "turboquant-delta": (POLICY(codec="turboquant-delta", bits_k=4, bits_v=3,
                                delta_stage=model_pb2.DeltaStage(anchor_every=16, anchor_threshold=800)), 0.019, 0.07),
    "int8-delta": (POLICY(codec="int8-delta", bits_k=8, bits_v=8), 1e-4, 1e-4),
    "polarquant-low-rank": (POLICY(codec="polarquant-low-rank", codec_v="int8-low-rank", bits_k=3, bits_v=8,
                                   polarquant=model_pb2.Polarquant(row_norms=2),
                                   low_rank_stage=model_pb2.LowRankStage(rank=2)), 0.035, 5e-5),
    "kivi-delta": (POLICY(codec="kivi-delta", codec_v="polarquant-delta", bits_k=4, bits_v=3,
                          kivi=model_pb2.Kivi(q_group_size=64)), 0.02, 0.07),
    "turboquant-outliers-delta": (POLICY(codec="turboquant-outliers-delta", codec_v="running-u8-low-rank", bits_k=3, bits_v=8,
                                         turboquant=model_pb2.Turboquant(rotation=2),
                                         turboquant_outliers=model_pb2.OutlierChannels(n_out=8),
                                         delta_stage=model_pb2.DeltaStage(anchor_every=8)), 0.2, 5e-5),
    "ecsq": (POLICY(codec="ecsq", bits_k=3.5, bits_v=2.25), 0.02, 0.09),
    "ecsq-kivi": (POLICY(codec="kivi", codec_v="ecsq", bits_k=4, bits_v=3), 0.009, 0.035),
    "two": (POLICY(codec="turboquant", codec_v="kivi", bits_k=4, bits_v=4), 0.0095, 0.009),
}
# Those that have daemons of their own: the code of files and disks is the same for all, and sanitizers make it slow.
WITH_DAEMONS = list(CODECS)[::4 if SANITIZED else 1]


@pytest.fixture(params=CODECS)
def cache(request, make_cache):
    return filled(make_cache, request.param)


def filled(make, name, **fields):
    policy, most_k, most_v = CODECS[name]
    made = make(layers=LAYERS, key_dim=64, value_dim=32, recent_window=WINDOW, policy=policy, rope=model_pb2.Rope(theta=10000),
                **fields)
    made.most, made.exact = (most_k, most_v), []
    for layer in range(LAYERS):
        made.exact.append(made.rows(TOKENS))
        made.append(0, *made.exact[layer], layer=layer)
    return made


def error(a, b):
    return np.sum((a - b) ** 2) / np.sum(a ** 2)


def everything(cache):
    query = np.random.default_rng(3).standard_normal((2, cache.q_heads, cache.key_dim)).astype(np.float32)
    arrays = []
    for layer in range(LAYERS):
        arrays += [*cache.fetch((layer,)), *cache.attend(cache.info().lengths[layer] - 2, query, layer=layer)]
    return arrays


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_rows_and_attention(cache):
    info = cache.info()
    assert info.tokens_coded == LAYERS * CODED and 0 < info.bits_per_coordinate < 12 and info.calibration == 0
    for layer in range(LAYERS):
        for exact, read, most in zip(cache.exact[layer], cache.fetch((layer,)), cache.most):
            assert np.array_equal(exact[CODED:], read[CODED:])
            assert most / 5 < error(exact[:CODED], read[:CODED]) < most
        k, v = cache.fetch((layer,))
        for count in (1, 3, 20):
            query = cache.queries(count)
            out, lse = cache.attend(TOKENS - count, query, layer=layer)
            expected, expected_lse = attention(query, k, v, TOKENS - count)
            assert np.allclose(out, expected, atol=2e-5) and np.allclose(lse, expected_lse, atol=2e-5)
            quick, quick_lse = cache.attend(TOKENS - count, query, layer=layer, in_floats=False)
            assert error(expected, quick) < 0.002 and np.allclose(quick_lse, expected_lse, atol=0.05)


def test_repeated_and_other_rows(cache):
    k, v = cache.exact[0]
    assert cache.append(0, k, v).tokens == 0
    with refused(grpc.StatusCode.ALREADY_EXISTS):
        cache.append(0, -k, v)
    with refused(grpc.StatusCode.ALREADY_EXISTS):
        cache.append(100, k[100:200], 2 * v[100:200])


def test_forks_and_truncation(cache):
    before = everything(cache)
    fork = copy.copy(cache)
    fork.name = f"{cache.name}-fork"
    made = cache.stub.Fork(kv.ForkRequest(session=cache.name, fork=fork.name), timeout=TIMEOUT).info
    assert made.bytes_shared == made.bytes_coded > 0 and same(everything(fork), before)
    fork.append(TOKENS, *fork.rows(200))
    cache.stub.Truncate(kv.TruncateRequest(session=fork.name, position=100, layers=[1]), timeout=TIMEOUT)
    assert same(everything(cache), before)
    fork.append(100, *(part[100:] for part in fork.exact[1]), layer=1)
    k, v = fork.fetch((1,))
    assert error(fork.exact[1][0][:CODED], k[:CODED]) < cache.most[0] * 1.2


def test_planes_stay(cache):
    before = everything(cache)
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "drops no planes"):
        cache.stub.Demote(kv.DemoteRequest(session=cache.name, bits=1), timeout=TIMEOUT)
    assert same(everything(cache), before)


@pytest.mark.parametrize("name", WITH_DAEMONS)
def test_copies_and_files(daemon, make_cache, name, tmp_path):
    cache = filled(make_cache, name)
    before, path = everything(cache), str(tmp_path / "session.qkvs")
    with Daemon() as other:
        json_lines("qkvctl", "copy", cache.name, "--to", other.target, "--target", daemon.target)
        moved = copy.copy(cache)
        moved.stub = other.stub()
        assert same(everything(moved), before) and moved.info().policy == cache.info().policy
    json_lines("qkvctl", "fetch", cache.name, "--coded", "--output", path, "--target", daemon.target)
    json_lines("qkvctl", "load", path, "--session", "again", "--target", daemon.target)
    again = copy.copy(cache)
    again.name = "again"
    assert same(everything(again), before)
    cache.stub.CloseSession(kv.CloseSessionRequest(session="again"), timeout=TIMEOUT)


@pytest.mark.parametrize("name", WITH_DAEMONS)
def test_sessions_outlive_the_process(name, tmp_path):
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-segment", "4MiB")
    with Daemon(*arguments) as daemon:
        cache = filled(lambda **fields: Cache(daemon.stub(), "kept", **fields), name, durability=kv.DURABILITY_SYNC)
        before, policy = everything(cache), cache.info().policy
        daemon.kill()
    with Daemon(*arguments) as daemon:
        cache.stub = daemon.stub()
        assert same(everything(cache), before) and cache.info().policy == policy
        cache.stub.CloseSession(kv.CloseSessionRequest(session=cache.name, keep=True), timeout=TIMEOUT)
        assert cache.info().bytes_coded == 0
        coded = [array[:CODED] for array in cache.fetch((1,))]
        assert same(coded, [array[:CODED] for array in before[4:6]])


@pytest.mark.parametrize("policy, text", [
    (POLICY(codec="kivi", bits_k=2.5), "policy.bits_k is 2.5, allowed are whole numbers from 2 to 8 with kivi"),
    (POLICY(codec="running-u8", bits_k=8, bits_v=4), "policy.bits_v is 4, allowed are 8 with running-u8"),
    (POLICY(codec="kivi", kivi=model_pb2.Kivi(q_group_size=48)), "policy.kivi.q_group_size is 48, allowed are 32 and 64"),
    (POLICY(codec="kivi-low-rank", low_rank_stage=model_pb2.LowRankStage(rank=17)),
     "policy.low_rank_stage.rank is 17, allowed are 1 to 16"),
    (POLICY(codec="int8-delta", delta_stage=model_pb2.DeltaStage(anchor_every=12)),
     "policy.delta_stage.anchor_every is 12, allowed are 8, 16, 32 and 64"),
    (POLICY(codec="kivi-delta", kivi=model_pb2.Kivi(q_group_size=48)), "policy.kivi.q_group_size is 48, allowed are 32 and 64"),
    (POLICY(codec="turboquant-outliers-delta", turboquant_outliers=model_pb2.OutlierChannels(n_out=12)),
     "policy.turboquant_outliers.n_out is 12, allowed are multiples of 8 from 8 to 1016"),
    (POLICY(codec="turboquant-delta", turboquant=model_pb2.Turboquant(rotation=3)),
     "policy.turboquant.rotation is 3, allowed are 1 (Hadamard) and 2 (dense)"),
    (POLICY(codec="turboquant-delta", low_rank_stage=model_pb2.LowRankStage(rank=2)),
     'policy.low_rank_stage is there, but policy.codec is "turboquant-delta"'),
    (POLICY(codec="turboquant", kivi=model_pb2.Kivi(q_group_size=32)), 'policy.kivi is there, but policy.codec is "turboquant"'),
    (POLICY(codec="commvq", bits_k=2, bits_v=2), 'policy.codec is "commvq", which codes keys before RoPE, and model.rope is not there'),
    (POLICY(codec="kivi", codec_v="embedded"), "embedded codes keys and values together"),
    (POLICY(codec="kivi", codec_v="zip"), 'policy.codec_v is "zip", known are embedded, exact, kivi'),
    (POLICY(codec_v="kivi"), 'policy.codec_v is "kivi" without policy.codec'),
])
def test_policies_out_of_their_limits(stub, make_cache, policy, text):
    cache = make_cache(layers=1)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, text):
        stub.OpenSession(kv.OpenSessionRequest(session="refused", model=cache.model.name, policy=policy), timeout=TIMEOUT)
    with refused(grpc.StatusCode.NOT_FOUND):
        stub.GetSession(kv.GetSessionRequest(session="refused"), timeout=TIMEOUT)


def test_layers_with_codecs_of_their_own(make_cache):
    overrides = [model_pb2.LayerOverride(layer=0, policy=POLICY(codec="running-u8", bits_k=8, bits_v=8)),
                 model_pb2.LayerOverride(layer=2, policy=POLICY(codec="exact"))]
    cache = make_cache(layers=4, key_dim=64, value_dim=64, recent_window=0, bits_k=3, bits_v=3, overrides=overrides)
    most = [2e-4, 0.06, 0, 0.06]
    for layer in range(4):
        k, v = cache.rows(256)
        cache.append(0, k, v, layer=layer)
        read_k, read_v = cache.fetch((layer,))
        assert error(k, read_k) <= most[layer] and error(v, read_v) <= most[layer]
        query = cache.queries(1)
        assert np.allclose(cache.attend(255, query, layer=layer)[0], attention(query, read_k, read_v, 255)[0], atol=2e-5)


@pytest.mark.parametrize("codec", ["commvq", "pq", "turboquant-outliers"])
def test_codes_of_a_calibration(tmp_path, codec):
    """Codebooks and channels are those of the calibration that a page names, in other daemons and processes, too."""
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-segment", "4MiB")
    with Daemon(*arguments) as daemon, Daemon() as other:
        cache = Cache(daemon.stub(), "kept", layers=LAYERS, key_dim=64, value_dim=32, recent_window=WINDOW,
                      policy=POLICY(codec=codec, bits_k=2, bits_v=2), rope=model_pb2.Rope(theta=10000),
                      durability=kv.DURABILITY_SYNC)
        shift = np.linspace(-5, 5, 32, dtype=np.float32)  # values far from 0, as a calibration knows

        def append(tokens, layer):
            k, v = cache.rows(tokens)
            cache.append(cache.info().lengths[layer], k, v + shift, layer=layer)

        for layer in range(LAYERS):
            append(300, layer)
        calibrate(daemon, cache, tmp_path)
        for layer in range(LAYERS):
            append(300, layer)
        assert cache.info().calibration != 0
        k, v = cache.fetch((1,))
        query = cache.queries(2)
        out, lse = cache.attend(598, query, layer=1)
        expected, expected_lse = attention(query, k, v, 598)
        assert np.allclose(out, expected, atol=5e-5) and np.allclose(lse, expected_lse, atol=5e-5)
        before = everything(cache)
        json_lines("qkvctl", "copy", cache.name, "--to", other.target, "--target", daemon.target)
        moved = copy.copy(cache)
        moved.stub = other.stub()
        assert same(everything(moved), before)
        daemon.kill()
    with Daemon(*arguments) as daemon:
        cache.stub = daemon.stub()
        assert same(everything(cache), before)


@pytest.mark.parametrize("own, others", [("pq", ""), ("commvq", ""), ("", "pq"), ("", "int8")])
def test_a_calibration_that_is_learnt(own, others):
    """Trials are of the codecs that the model and its sessions have."""
    with Daemon("--calibrate-tokens", "1024") as daemon:
        cache = Cache(daemon.stub(), "s", layers=1, key_dim=64, value_dim=64, recent_window=0,
                      policy=POLICY(codec=own, bits_k=2, bits_v=2), rope=model_pb2.Rope(theta=10000))
        if others:
            cache.stub.OpenSession(kv.OpenSessionRequest(session="other", model=cache.model.name,
                                                         policy=POLICY(codec=others)), timeout=TIMEOUT)
        fall = np.exp(-np.arange(64) / 12).astype(np.float32)
        cache.append(0, *(rows * fall + 0.3 for rows in cache.rows(1024)))
        wait_for(lambda: daemon.metric("qkvd_calibrations_total") == 1, "no calibration is made")
        cache.append(1024, *(rows * fall + 0.3 for rows in cache.rows(128)))
        assert cache.info().calibration != 0


def section_of_commvq(bits, layers, kv_heads, key_dim):
    """The header of its section in a calibration's file."""
    return struct.pack("<BBB5xQ48x", 9, 1, bits, 64 + layers * kv_heads * key_dim * bits * 64)


def turned(k, position):
    """Keys [tokens][heads][64] by RoPE of theta 10000."""
    angles = (position + np.arange(len(k)))[:, None, None] * 10000.0 ** (-np.arange(32) / 32)
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = k[..., :32], k[..., 32:]
    return np.concatenate([first * cosines - second * sines, first * sines + second * cosines], axis=-1)


def test_commvq_learns_from_traffic(tmp_path):
    """Codebooks that one session's rows teach are in the model's calibration, and code sessions to come, also after a
    restart and in another daemon that is given the file."""
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-segment", "4MiB", "--calibrate-tokens", "1024")
    policy = POLICY(codec="commvq", bits_k=2, bits_v=1, recent_window=0)
    mix = np.random.default_rng(5).standard_normal((2, 64, 64)) * np.exp(-np.arange(64) / 12)[:, None]
    mix = mix.astype(np.float32)

    def open_session(cache, name):
        session = copy.copy(cache)
        session.name = name
        session.stub.OpenSession(kv.OpenSessionRequest(session=name, model=cache.model.name, policy=policy,
                                                       durability=kv.DURABILITY_SYNC), timeout=TIMEOUT)
        return session

    def append(session, position, tokens):
        """The rows, and the relative errors that they are read with."""
        errors = []
        for layer in range(LAYERS):
            k, v = (part @ mix[i] + 4 for i, part in enumerate(session.rows(tokens)))
            k = turned(k, position)
            session.append(position, k, v, layer=layer)
            errors += [error(a, b[position:]) for a, b in zip((k, v), session.fetch((layer,)), strict=True)]
        return errors

    def better(errors, others):
        """Keys of some heads may have fallen back."""
        return all(a < most * b for a, b, most in zip(errors, others, (0.6, 0.3) * LAYERS, strict=True))

    with Daemon(*arguments) as daemon, Daemon("--calibrate-tokens", "0") as other:
        first = Cache(daemon.stub(), "first", layers=LAYERS, key_dim=64, value_dim=64, policy=policy,
                      recent_window=0, rope=model_pb2.Rope(theta=10000), durability=kv.DURABILITY_SYNC)
        data_free = append(first, 0, 1024)
        wait_for(lambda: daemon.metric("qkvd_calibrations_total") == 1, "no calibration is made")
        second = open_session(first, "second")
        learnt = append(second, 0, 256)
        version = second.info().calibration
        assert version != 0 and better(learnt, data_free)
        k, v = second.fetch((1,))
        query = second.queries(2)
        assert np.allclose(second.attend(254, query, layer=1)[0], attention(query, k, v, 254)[0], atol=5e-4)
        chunks = second.stub.GetCalibration(model_pb2.GetCalibrationRequest(model=second.model.name), timeout=TIMEOUT)
        file = b"".join(chunk.chunk for chunk in chunks)
        assert section_of_commvq(2, LAYERS, 2, 64) in file and section_of_commvq(1, LAYERS, 2, 64) not in file
        before = everything(second)
        given = Cache(other.stub(), "given", layers=LAYERS, key_dim=64, value_dim=64, policy=policy, recent_window=0,
                      rope=model_pb2.Rope(theta=10000), calibration=file, calibration_trusted=True)
        assert better(append(given, 0, 256), data_free)
        assert given.info().calibration == version
        daemon.kill()
    with Daemon(*arguments) as daemon:
        second.stub = daemon.stub()
        assert same(everything(second), before)
        third = open_session(second, "third")
        assert better(append(third, 0, 256), data_free)
        assert third.info().calibration == version


@pytest.mark.skipif(SANITIZED, reason="trains codebooks of a whole model, minutes with sanitizers")
def test_commvq_by_the_worker(tmp_path):
    """The file of qkv-worker calibrate has its codebooks, and what a daemon codes with it is better."""
    file, text = str(tmp_path / "t.qkvc"), os.path.join(DATA, "calibration.txt")
    json_lines("qkv-worker", "calibrate", "--model", DATA, "--text", text, "--tokens", "6144", "--codec", "commvq", "--bits",
               "2", "--output", file)
    with open(file, "rb") as opened:
        assert section_of_commvq(2, 6, 2, 64) in opened.read()
    score = ("qkv-worker", "score", "--model", DATA, "--text", os.path.join(DATA, "heldout_kjv.txt"), "--windows", "1",
             "--prefill", "384", "--length", "512", "--codec", "commvq", "--bits", "2")
    with Daemon("--calibrate-tokens", "0") as daemon:
        (plain,) = json_lines(*score, "--target", daemon.target)
        (with_file,) = json_lines(*score, "--calibration", file, "--target", daemon.target)
    assert with_file["kl_bits"] < 0.7 * plain["kl_bits"]


def test_the_daemons_default(tmp_path):
    """--codec is what sessions that name none have, and qkv-worker's, with bits that the codec has."""
    with Daemon("--codec", "turboquant", "--codec-v", "int8") as daemon:
        cache = Cache(daemon.stub(), "plain", layers=1, key_dim=64, value_dim=32, recent_window=0)
        policy = cache.info().policy
        assert (policy.codec, policy.codec_v, policy.bits_k, policy.bits_v) == ("turboquant", "int8", 4, 8)
        k, v = cache.rows(128)
        cache.append(0, k, v)
        read_k, read_v = cache.fetch((0,))
        assert 1e-3 < error(k, read_k) < 0.0095 and error(v, read_v) < 5e-5
        score = ("qkv-worker", "score", "--model", DATA, "--text", os.path.join(DATA, "heldout_kjv.txt"), "--windows", "1",
                 "--prefill", "64", "--length", "128", "--target", daemon.target)
        (figures,) = json_lines(*score)
        assert (figures["bits_k"], figures["bits_v"]) == (4, 8)
        (figures,) = json_lines(*score, "--codec", "kivi", "--codec-v", "pq", "--bits", "2")
        assert (figures["bits_k"], figures["bits_v"]) == (2, 2) and 2.5 < figures["bits_per_coordinate"] < 3.2
