"""What connectors share, without an engine: settings, the breaker, and sequences found by their ids."""

import dataclasses
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from daemon import Daemon, wait_for

import qkvd
from qkvd.configs import rope_of
from qkvd.prefixes import NOTHING, Breaker, Options, Prefixes

LOG = logging.getLogger("test")


def test_options():
    assert Options.of({}) == Options()
    assert (Options.of({}).policy().bits_k, Options.of({"bits": None}).policy().bits_k) == (8, 0)
    assert Options.of({"bits": "exact"}).policy() == qkvd.EXACT
    assert (Options.of({"bits": 4}).policy().bits_k, Options.of({"bits": 4}).policy().recent_window) == (4, 0)
    policy = Options.of({"codec": "turboquant", "codec_v": "kivi"}).policy()
    assert (policy.codec, policy.codec_v, policy.bits_k, policy.recent_window) == ("turboquant", "kivi", 0, 0)
    for config, text in (
        ({"bit": 4}, "'bit' is no option"),
        ({"bits": "four"}, "bits is 'four', allowed are"),
        ({"codec": "zip"}, "codec is 'zip', known are embedded, exact"),
        ({"codec_v": "kivi"}, "codec_v is 'kivi' without codec"),
        ({"codec": "kivi", "bits": "exact"}, "bits is \"exact\" and codec is 'kivi'"),
        ({"durability": "disk"}, "durability is 'disk', allowed are"),
        ({"timeout": 0}, "timeout is 0, it is a number of seconds above 0"),
        ({"ttl": -1}, "ttl is -1, it begins at 0"),
        ({"ttl": float("inf")}, "ttl is inf, it is a number of seconds"),
        ({"timeout": "10"}, "timeout is of type str, it is a number"),
        ({"lookup_timeout": None}, "lookup_timeout is of type NoneType, it is a number"),
        ({"save_buffer": "1 GiB"}, "save_buffer is of type str, it is a number"),
        ({"target": 7580}, "target is of type int, it is a text"),
        ({"token": 12345}, "token is of type int, it is a text"),
        ({"bits": 16}, "bits is 16, allowed are"),
        ({"bits": [8]}, r"bits is \[8\], allowed are"),
    ):
        with pytest.raises(qkvd.InvalidArgument, match=text):
            Options.of(config)


def test_configurations_that_do_not_say_all_of_a_rope():
    """Such as those of models that vLLM brings itself: an engine begins all the same."""
    for fields, rope in (
        ({}, (1e4, 0, "none", 0)),
        ({"max_position_embeddings": None}, (1e4, 0, "none", 0)),
        ({"rope_theta": [1e4, 5e5]}, None),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, None),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64}, (1e4, 0, "dynamic", 64)),
        ({"partial_rotary_factor": 0.5}, None),
        ({"partial_rotary_factor": 0.5, "hidden_size": 64, "num_attention_heads": 4}, (1e4, 8, "none", 0)),
        ({"partial_rotary_factor": 0.5, "head_dim": 32}, (1e4, 16, "none", 0)),
    ):
        found = rope_of(SimpleNamespace(**{"model_type": "llama", "rope_theta": 1e4} | fields))
        assert rope == (found and (found.theta, found.width, found.scaling, found.original_max_position))


def test_salts_tell_sequences_apart():
    salts = [
        Options(bits=None).salt(None), Options().salt(None), Options(bits=4).salt(None), Options(bits="exact").salt(None),
        Options().salt("alice"), Options().salt(["adapter", "path"]), Options().salt("bob"),
        Options(codec="kivi").salt(None), Options(codec="kivi", codec_v="pq").salt(None),
        Options(codec="kivi", bits=4).salt(None),
        *(Options(durability=durability).salt(None) for durability in ("memory", "async", "sync")),
        *(Options(self_calibration=learns).salt(None) for learns in (True, False)),
    ]  # fmt: skip
    assert len(set(salts)) == len(salts)
    assert salts[0] == b""
    assert Options(bits=4).salt(None, None) == Options(bits=4).salt(None, None)


def test_breaker():
    now = [0.0]
    breaker = Breaker(lambda: now[0])
    assert not breaker.open()
    breaker.tell(qkvd.Unavailable("gone"))
    assert breaker.open()
    now[0] = 1.1
    assert not breaker.open()
    for _ in range(10):
        breaker.tell(qkvd.DeadlineExceeded("slow"))
    now[0] += Breaker.MOST + 0.1
    assert not breaker.open()
    breaker.tell(qkvd.Unavailable("gone"))
    assert breaker.open()
    breaker.tell(qkvd.ResourceExhausted("a refusal is an answer"))
    assert not breaker.open()


@pytest.fixture
def prefixes(daemon, model):
    made = Prefixes(Options(target=daemon.target, bits="exact", timeout=30, lookup_timeout=30), model, LOG)
    yield made
    made.close()


def test_sequences(prefixes, client, model, rows):
    ids, salt = list(range(200)), b"s"
    assert prefixes.match(ids, salt) == NOTHING
    k, v = rows(192)
    layers = [(k + layer, v - layer) for layer in range(model.layers)]
    assert prefixes.open("first", ids[:192], salt) == 0
    prefixes.append("first", 0, ids[:128], [(k[:128], v[:128]) for k, v in layers])
    assert (prefixes.match(ids, salt).session, prefixes.match(ids, salt).tokens) == ("first", 128)
    assert prefixes.match(ids, b"another") == NOTHING
    # A longer one begins with what is held.
    assert prefixes.open("second", ids[:192], salt) == 128
    prefixes.append("second", 128, ids[128:192], [(k[128:], v[128:]) for k, v in layers])
    found = prefixes.match(ids, salt)
    assert (found.session, found.tokens) == ("second", 192)
    pieces = list(prefixes.fetch("second", range(model.layers), 64, 192, 32))
    for layer, (k, v) in enumerate(layers):
        mine = [piece for piece in pieces if piece.layer == layer]
        np.testing.assert_array_equal(np.concatenate([p.k for p in mine], 1), k[64:192].transpose(1, 0, 2))
        np.testing.assert_array_equal(np.concatenate([p.v for p in mine], 1), v[64:192].transpose(1, 0, 2))
    with pytest.raises(qkvd.NotFound, match="had 256 rows of 384"):
        list(prefixes.fetch("first", range(model.layers), 0, 192, 32))
    for name in ("first", "second"):
        prefixes.drop(name)
    assert prefixes.match(ids, salt) == NOTHING


def test_what_is_matched_can_be_gone_on_with(model, rows, tmp_path):
    """A session that `open` would pass over is not found."""
    ids = list(range(128))
    k, v = rows(128)
    settings = [{}, {"durability": "memory"}, {"self_calibration": True}, {"self_calibration": False}, {"bits": 4}]
    with Daemon("--data-dir", str(tmp_path)) as daemon:
        for number, one in enumerate(settings):
            options = Options.of({"target": daemon.target, "timeout": 30, "lookup_timeout": 30, **one})
            prefixes = Prefixes(options, model, LOG)
            matched = prefixes.match(ids, options.salt())
            assert (matched.tokens, prefixes.open(f"s{number}", ids, options.salt())) == (0, 0)
            prefixes.append(f"s{number}", 0, ids, [(k, v)] * model.layers)
            assert prefixes.match(ids, options.salt()).tokens == 128
            assert prefixes.open(f"s{number}-more", ids, options.salt()) == 128
            prefixes.close()


@pytest.mark.parametrize("other", [{"kv_heads": 1, "q_heads": 1}, {"key_dim": 32}, {"value_dim": 8}, {"dtype": "bf16"}])
def test_rows_of_another_model_of_the_name_are_a_miss(prefixes, model, rows, other, name):
    ids = list(range(64))
    prefixes.open(name, ids, b"shapes")
    prefixes.append(name, 0, ids, [rows(64)] * model.layers)
    mine = Prefixes(prefixes.options, dataclasses.replace(model, **other), LOG)
    with pytest.raises(qkvd.NotFound, match="has rows of 2 heads of 16 in float32, not of"):
        list(mine.fetch(name, [0], 0, 64, 64))
    mine.close()
    assert list(prefixes.fetch(name, [0], 0, 64, 64))


def test_the_longest_unused_are_evicted(model, rows):
    """A daemon whose memory holds some sequences closes those that nobody has used for longest."""
    with Daemon("--memory-budget", "8MB") as daemon:
        prefixes = Prefixes(Options(target=daemon.target, bits="exact", timeout=30, lookup_timeout=30), model, LOG)
        k, v = rows(1024)
        for place in range(30):
            ids = [place] * 1024
            assert prefixes.open(f"s{place}", ids, b"") == 0
            prefixes.append(f"s{place}", 0, ids, [(k, v)] * model.layers)
            list(prefixes.fetch("s0", [0], 0, 64, 64))  # a use
        held = [place for place in range(30) if prefixes.match([place] * 1024, b"").tokens == 1024]
        assert {0, 29} <= set(held)
        assert len(held) < 30
        prefixes.close()


def test_a_daemon_that_begins_anew(model, rows):
    """It knows no model; what nobody answers is a miss, and asked for again after a while."""
    with Daemon() as daemon:
        prefixes = Prefixes(Options(target=daemon.target, bits="exact", timeout=30, lookup_timeout=30), model, LOG)
        assert prefixes.match(list(range(64)), b"") == NOTHING
        assert prefixes.open("before", list(range(64)), b"") == 0
        daemon.kill()
        assert prefixes.match(list(range(64)), b"") == NOTHING
        assert prefixes.breaker.open()
        daemon.start()

        def opens():
            try:
                return prefixes.open("after", list(range(64)), b"") == 0
            except qkvd.Unavailable:  # gRPC connects anew in its own time
                return False

        wait_for(opens, "the daemon is not used again")
        assert not prefixes.breaker.open()
        prefixes.close()


def test_long_prompts_are_asked_for_in_two_steps(prefixes, monkeypatch):
    monkeypatch.setattr("qkvd.prefixes.FIRST_ASKED", 128)
    asked = []
    match = prefixes.client.match
    monkeypatch.setattr(
        prefixes.client, "match", lambda model, ids, **more: asked.append(len(ids)) or match(model, ids, **more)
    )
    ids = list(range(1000, 1640))
    name = "two-steps"
    model = prefixes.model
    prefixes.open(name, ids, b"")
    rows = [np.zeros((640, model.kv_heads, dim), np.float32) for dim in (model.key_dim, model.value_dim or model.key_dim)]
    prefixes.append(name, 0, ids, [tuple(rows)] * model.layers)
    assert prefixes.match(ids, b"").tokens == 640
    assert prefixes.match([*ids[:300], *ids], b"").tokens == 256
    assert asked == [128, 640, 128, 940]
    asked.clear()
    assert prefixes.match([*ids[:100], *ids], b"").tokens == 64
    assert prefixes.match(ids[::-1], b"").tokens == 0
    assert prefixes.match(ids[:512], b"").tokens == 512  # no long one
    assert asked == [128, 128, 512]


def test_opaque_pages(prefixes, client, monkeypatch):
    monkeypatch.setattr("qkvd.prefixes.NAMES_MOST", 2)
    names = [f"opaque/{place}" for place in range(5)]
    pages = {name: np.full(100, place, np.uint8) for place, name in enumerate(names)}
    assert prefixes.pages_held(names) == 0
    del pages[names[3]]
    assert prefixes.put_pages(pages) == 4
    assert prefixes.pages_held(names) == 3
    assert prefixes.pages_held(names[4:]) == 1
    pages[names[3]] = np.full(100, 3, np.uint8)
    assert prefixes.put_pages(pages) == 1  # the others are held
    assert prefixes.pages_held(names) == 5
    out = [np.zeros(100, np.uint8) for _ in names]
    assert prefixes.get_pages(names, out) == 5
    assert [set(one.tolist()) for one in out] == [{place} for place in range(5)]
    client.delete_objects([names[1]])
    client.put_object(names[4], b"shorter", replace=True)
    assert prefixes.get_pages(names, out) == 1
    assert prefixes.get_pages(names[2:], out[2:]) == 2
    client.delete_objects(names)
