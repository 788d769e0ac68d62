"""The archive codec: what sessions to be fetched are coded by while a calibration is in force, through the real daemon."""

import copy

import numpy as np
import pytest

from daemon import Daemon, wait_for
from kv import TIMEOUT, Cache
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2
from test_codecs import error, everything, same
from test_coded import calibrate

POLICY = model_pb2.CodecPolicy
CODED, IDS = 256, list(range(1000, 1256))


def open_named(cache, name, **fields):
    """At 2 bits, all pages coded, unless the fields say otherwise."""
    fields.setdefault("purpose", kv.PURPOSE_FETCH)
    policy = POLICY(bits_k=2, bits_v=2, recent_window=0)
    policy.MergeFrom(fields.pop("policy", POLICY()))
    request = kv.OpenSessionRequest(session=name, model=cache.model.name, policy=policy, **fields)
    return cache.stub.OpenSession(request, timeout=TIMEOUT)


def codec_of(cache, **fields):
    """Of a session that is opened so, and closed again."""
    name = open_named(cache, "asked", **fields).info.policy.codec
    cache.stub.CloseSession(kv.CloseSessionRequest(session="asked"), timeout=TIMEOUT)
    return name


def taught(daemon, folder):
    """A cache with a session of before its model's calibration, which is in force."""
    cache = Cache(daemon.stub(), "before", layers=2, key_dim=64, value_dim=64, recent_window=0, bits_k=2, bits_v=2,
                  rope=model_pb2.Rope(theta=10000), purpose=kv.PURPOSE_FETCH)
    fall = np.exp(-np.arange(64) / 12).astype(np.float32)
    cache.mixed = lambda: [rows * fall + 0.3 for rows in cache.rows(CODED)]
    for layer in range(2):
        cache.append(0, *cache.mixed(), layer=layer, token_ids=IDS)
    calibrate(daemon, cache, folder)
    return cache


@pytest.fixture
def archive(tmp_path):
    with Daemon("--data-dir", str(tmp_path / "data"), "--storage-segment", "4MiB") as daemon:
        yield taught(daemon, tmp_path)


def test_which_sessions_have_it(archive):
    assert archive.info().policy.codec == "embedded"  # as it was opened before
    assert codec_of(archive) == "ecsq"
    assert codec_of(archive, policy=POLICY(bits_k=3)) == "ecsq"
    assert codec_of(archive, durability=kv.DURABILITY_MEMORY, retention=kv.RETENTION_EVICT) == "ecsq"
    for fields in ({"purpose": kv.PURPOSE_ATTEND}, {"policy": POLICY(codec="embedded")}, {"tier_bits": 1.5},
                   {"max_attention_error": 0.1}, {"keep_full": True}, {"policy": POLICY(anchor="mean")},
                   {"policy": POLICY(bits_k=0.5)}, {"durability": kv.DURABILITY_MEMORY}):
        assert codec_of(archive, **fields) == "embedded", fields


def test_rows_err_less_in_no_more_bytes(archive):
    errors, sizes = {}, {}
    for name, fields in (("default", {}), ("old", {"policy": POLICY(codec="embedded")})):
        open_named(archive, name, **fields)
        archive.name = name
        rows = [archive.mixed() for _ in range(2)]
        for layer in range(2):
            archive.append(0, *rows[layer], layer=layer)
        errors[name] = [error(a, b) for layer in range(2)
                        for a, b in zip(rows[layer], archive.fetch((layer,)), strict=True)]
        sizes[name] = archive.info().bytes_coded
        assert archive.info().calibration != 0 and archive.info().tokens_coded == 2 * CODED
    assert sizes["default"] < sizes["old"]
    assert sum(errors["default"]) < 0.95 * sum(errors["old"]), errors


@pytest.mark.parametrize("options", [["--archive-codec", "embedded"], ["--tier-thresholds", "0.01,0.001,0.0001"],
                                     ["--tier-bits", "2"], ["--codec", "turboquant"]])
def test_daemons_without(tmp_path, options):
    with Daemon("--data-dir", str(tmp_path / "data"), "--storage-segment", "4MiB", *options) as daemon:
        cache = taught(daemon, tmp_path)
        assert codec_of(cache) == cache.info().policy.codec != "ecsq"


def test_memory_alone(tmp_path):
    """Pages that cannot leave memory may have to lose planes; sessions that may be closed need not."""
    with Daemon() as daemon:
        cache = taught(daemon, tmp_path)
        assert codec_of(cache) == "embedded"
        assert codec_of(cache, retention=kv.RETENTION_EVICT) == "ecsq"


def test_prefixes_of_before_are_found(archive):
    """What a session of before the calibration holds is not lost to those that come after it."""
    opened = open_named(archive, "after", prefix_token_ids=IDS)
    assert opened.matched_tokens == CODED and opened.info.policy.codec == "embedded"
    opened = open_named(archive, "new")
    archive.name = "new"
    for layer in range(2):
        archive.append(0, *archive.mixed(), layer=layer, token_ids=IDS[::-1])
    opened = open_named(archive, "newer", prefix_token_ids=IDS[::-1])
    assert opened.matched_tokens == CODED and opened.info.policy.codec == "ecsq"


def test_short_memory_takes_them_to_the_ssd(tmp_path):
    """In their turn, as the coldest: those that are used more keep their bits."""
    marks = ("--memory-budget", "2MiB", "--memory-high", "0.6", "--memory-low", "0.5")
    with Daemon("--data-dir", str(tmp_path / "data"), "--storage-segment", "4MiB", *marks, "--calibrate-tokens",
                "0") as daemon:
        cache = Cache(daemon.stub(), "cold", layers=2, key_dim=64, value_dim=64, recent_window=0, bits_k=8, bits_v=8,
                      policy=POLICY(codec="ecsq"), purpose=kv.PURPOSE_FETCH)
        for layer in range(2):
            cache.append(0, *cache.rows(1280), layer=layer)
        before = everything(cache)
        wait_for(lambda: min(cache.info().durable) == 1280, "it is not on the SSD")
        for i in range(5):
            open_named(cache, f"warm{i}", purpose=kv.PURPOSE_ATTEND, policy=POLICY(codec="embedded", bits_k=4, bits_v=4))
            warm = copy.copy(cache)
            warm.name = f"warm{i}"
            for layer in range(2):
                warm.append(0, *warm.rows(640), layer=layer)
            wait_for(lambda: min(warm.info().durable) == 640, "it is not on the SSD")
        wait_for(lambda: "memory-low is reached" in daemon.log_text(), "memory is still short")
        assert daemon.metric("qkvd_storage_evicted_bytes_total") > 0 and daemon.metric("qkvd_tier_pages_total") == 0
        assert same(everything(cache), before)


def test_they_are_the_same_after_a_start(tmp_path):
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-segment", "4MiB")
    with Daemon(*arguments) as daemon:
        cache = taught(daemon, tmp_path)
        open_named(cache, "kept")
        cache.name = "kept"
        for layer in range(2):
            cache.append(0, *cache.mixed(), layer=layer)
        before = everything(cache)
    with Daemon(*arguments) as daemon:
        cache.stub = daemon.stub()
        assert cache.info().policy.codec == "ecsq"
        assert same(everything(cache), before)
