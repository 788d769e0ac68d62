"""Coded pages between daemons and files: qkvctl copy, fetch --coded and load."""

import os

import numpy as np
import pytest

from daemon import Daemon
from kv import FP16, TIMEOUT, Cache, Tenant, refused
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2
from test_cli import DATA, json_lines, run

import grpc

ROPE = model_pb2.Rope(theta=10000)


@pytest.fixture
def other():
    with Daemon() as running:
        yield running


class Moved(Cache):
    """A cache's session in another daemon."""

    def __init__(self, cache, daemon):
        self.__dict__.update(cache.__dict__)
        self.stub = daemon.stub()


def calibrate(daemon, cache, folder):
    """Gives the cache's model a calibration that is in force at once."""
    dump, file = os.path.join(folder, "dump.safetensors"), os.path.join(folder, "c.qkvc")
    json_lines("qkvctl", "fetch", cache.name, "--output", dump, "--target", daemon.target)
    json_lines("qkvctl", "calibrate", cache.model.name, "--from", dump, "--output", file, "--target", daemon.target)
    with open(file, "rb") as opened:
        model = model_pb2.Model()
        model.CopyFrom(cache.model)
        model.calibration = opened.read()
    model.calibration_trusted = True
    cache.stub.RegisterModel(model_pb2.RegisterModelRequest(model=model), timeout=TIMEOUT)


@pytest.fixture(params=[1, 2], ids=["attend", "fetch"])
def cache(request, daemon, make_cache, tmp_path):
    """Data-free and calibrated pages, some with fewer bits, one cut short, and exact rows."""
    made = make_cache(layers=3, dtype=FP16, recent_window=20, bits_k=3, bits_v=2, rope=ROPE, purpose=request.param,
                      key_dim=32, value_dim=16)
    for layer in range(3):
        made.append(0, *made.rows(200), layer=layer)
    calibrate(daemon, made, tmp_path)
    for layer in range(3):
        made.append(200, *made.rows(200), layer=layer)
    made.stub.Demote(kv.DemoteRequest(session=made.name, bits=1, even=True,
                                      range={"begin": 64, "end": 128}), timeout=TIMEOUT)
    made.stub.Truncate(kv.TruncateRequest(session=made.name, position=300), timeout=TIMEOUT)
    for layer in range(3):
        made.append(300, *made.rows(100 + 64 * layer), layer=layer)
    assert made.info().calibration != 0
    return made


def assert_same(cache, moved):
    before, after = cache.info(), moved.info()
    for field in ("lengths", "tokens_coded", "bytes_coded", "tokens_exact", "policy", "purpose", "first_position"):
        assert getattr(before, field) == getattr(after, field), field
    query = cache.queries(1)
    for layer in range(3):
        for ours, theirs in zip(cache.fetch((layer,)), moved.fetch((layer,))):
            assert np.array_equal(ours, theirs)
        at = before.lengths[layer] - 1
        for ours, theirs in zip(cache.attend(at, query, layer=layer), moved.attend(at, query, layer=layer)):
            assert np.array_equal(ours, theirs)


def copy(daemon, cache, other, *more):
    return json_lines("qkvctl", "copy", cache.name, "--to", other.target, "--target", daemon.target, *more)[0]


def test_copy(daemon, cache, other):
    report = copy(daemon, cache, other)
    moved = Moved(cache, other)
    assert_same(cache, moved)
    assert report["rows"] == sum(cache.info().lengths)
    assert report["bytes"] < cache.info().bytes_fp16 / 2
    # Nothing of it became the other model's.
    assert moved.info().calibration == 0
    # Again there is nothing to do; after a cut the rest is sent, whether it was a page or exact rows.
    assert copy(daemon, cache, other)["rows"] == 0
    for position in (440, 200, 64, 0):
        moved.stub.Truncate(kv.TruncateRequest(session=cache.name, position=position, layers=[1]), timeout=TIMEOUT)
        if position == 200:  # within a page
            result = run("qkvctl", "copy", cache.name, "--to", other.target, "--target", daemon.target)
            assert result.returncode == 1 and "truncate the target to 192" in result.stderr
            moved.stub.Truncate(kv.TruncateRequest(session=cache.name, position=192, layers=[1]), timeout=TIMEOUT)
            position = 192
        report = copy(daemon, cache, other)
        assert report["rows"] == cache.info().lengths[1] - position
        assert_same(cache, moved)


def test_what_the_session_was_opened_with(daemon, make_cache, other, tmp_path):
    """The copy, and what a file makes, has it too: its owner's daemon may have other defaults."""
    wanted = {"retention": kv.RETENTION_EVICT, "ttl_ms": 3600000, "max_attention_error": 0.25, "tier_bits": 1.5,
              "keep_full": True, "first_position": 7}
    made = make_cache(layers=1, dtype=FP16)
    made.name = f"{made.name}-opened"
    made.stub.OpenSession(kv.OpenSessionRequest(session=made.name, model=made.model.name, **wanted), timeout=TIMEOUT)
    made.append(7, *made.rows(100))
    copy(daemon, made, other)
    path = str(tmp_path / "session.qkvs")
    json_lines("qkvctl", "fetch", made.name, "--coded", "--output", path, "--target", daemon.target)
    json_lines("qkvctl", "load", path, "--session", "loaded", "--target", other.target)
    for name in (made.name, "loaded"):
        info = other.stub().GetSession(kv.GetSessionRequest(session=name), timeout=TIMEOUT)
        assert {field: getattr(info, field) for field in wanted} == wanted, name


def test_copy_is_refused(daemon, cache, other):
    result = run("qkvctl", "copy", cache.name, "--target", daemon.target)
    assert result.returncode == 2 and "--to" in result.stderr
    result = run("qkvctl", "copy", "nobody", "--to", other.target, "--target", daemon.target)
    assert result.returncode == 1 and "nobody" in result.stderr
    # Another model, another session of the name.
    model = model_pb2.Model(name=cache.model.name, layers=3, kv_heads=2, q_heads=2, key_dim=32, value_dim=16, dtype=FP16)
    other.stub().RegisterModel(model_pb2.RegisterModelRequest(model=model), timeout=TIMEOUT)
    result = run("qkvctl", "copy", cache.name, "--to", other.target, "--target", daemon.target)
    assert result.returncode == 1 and "another model" in result.stderr
    with refused(grpc.StatusCode.NOT_FOUND):
        Moved(cache, other).info()


def test_files(daemon, cache, other, tmp_path):
    path = str(tmp_path / "session.qkvs")
    saved = json_lines("qkvctl", "fetch", cache.name, "--coded", "--output", path, "--target", daemon.target)[0]
    assert saved["bytes"] <= os.path.getsize(path) <= saved["bytes"] + 100
    assert saved["calibrations"] == 1
    moved = Moved(cache, other)
    json_lines("qkvctl", "load", path, "--target", other.target)
    assert_same(cache, moved)
    # What the session has by itself cannot be given.
    for option in (("--bits-k", "2"), ("--purpose", "fetch"), ("--keep-full",), ("--evict",), ("--tier-bits", "0"),
                   ("--model", "m")):
        result = run("qkvctl", "load", path, *option, "--session", "again", "--target", other.target)
        assert result.returncode == 2 and f"{option[0]} is of a file of rows" in result.stderr
    # A load that was cut short goes on.
    moved.stub.Truncate(kv.TruncateRequest(session=cache.name, position=128), timeout=TIMEOUT)
    report = json_lines("qkvctl", "load", path, "--target", other.target)[0]
    assert report["rows"] == sum(cache.info().lengths) - 3 * 128
    assert_same(cache, moved)
    # Under another name, in the daemon that it came from.
    json_lines("qkvctl", "load", path, "--session", "again", "--target", daemon.target)
    cache.stub.CloseSession(kv.CloseSessionRequest(session="again"), timeout=TIMEOUT)


def test_damaged_files(daemon, cache, other, tmp_path):
    path = str(tmp_path / "session.qkvs")
    json_lines("qkvctl", "fetch", cache.name, "--coded", "--output", path, "--target", daemon.target)
    with open(path, "rb") as file:
        whole = file.read()
    rng = np.random.default_rng(1)
    for place in [4, 16, 20, 24, len(whole) - 8, *rng.integers(16, len(whole) - 64, 20)]:
        damaged = bytearray(whole)
        damaged[place] ^= 0x40
        with open(path, "wb") as file:
            file.write(damaged)
        result = run("qkvctl", "load", path, "--target", other.target)
        # What pads a payload is not looked at.
        if result.returncode == 0:
            assert whole[place] == 0
            other.stub().CloseSession(kv.CloseSessionRequest(session=cache.name), timeout=TIMEOUT)
            continue
        assert "session.qkvs" in result.stderr
    for length in (8, 16, 40, 1000, len(whole) - 1, len(whole) - 48):
        with open(path, "wb") as file:
            file.write(whole[:length])
        assert run("qkvctl", "load", path, "--target", other.target).returncode == 1
    with refused(grpc.StatusCode.NOT_FOUND):
        Moved(cache, other).info()


def test_real_rows(other, tmp_path):
    """A model's own keys and values under its calibration, to a daemon that has neither."""
    calibration, prompt = str(tmp_path / "t.qkvc"), tmp_path / "prompt.txt"
    with open(os.path.join(DATA, "heldout_kjv.txt"), "rb") as text:
        prompt.write_bytes(text.read(1500))
    json_lines("qkv-worker", "calibrate", "--model", DATA, "--text", os.path.join(DATA, "calibration.txt"), "--output",
               calibration)
    with Daemon("--calibration", f"tinylm={calibration}", "--trust-calibration") as daemon:
        json_lines("qkv-worker", "generate", "--model", DATA, "--prompt", str(prompt), "--tokens", "40", "--bits", "2.25",
                   "--session", "real", "--keep", "--target", daemon.target)
        before = json_lines("qkvctl", "session", "real", "--target", daemon.target)[0]
        json_lines("qkvctl", "copy", "real", "--to", other.target, "--target", daemon.target)
        after = json_lines("qkvctl", "session", "real", "--target", other.target)[0]
        for field in ("lengths", "bytes_coded", "bytes_exact", "bits_per_coordinate"):
            assert before[field] == after[field], field
        files = []
        for target in (daemon.target, other.target):
            files.append(tmp_path / f"rows-{len(files)}.safetensors")
            json_lines("qkvctl", "fetch", "real", "--output", str(files[-1]), "--target", target)
        assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("option", ["--heads-first", "--format=npy", "--begin=5", "--layers=1"])
def test_coded_goes_with_output_alone(daemon, tmp_path, option):
    result = run("qkvctl", "fetch", "x", "--coded", "--output", str(tmp_path / "x"), option, "--target", daemon.target)
    assert result.returncode == 2 and "--coded" in result.stderr


# ---- Token ids ----


def with_ids(daemon, name, salt=b"", tenant=""):
    """A session whose rows all have ids, and these."""
    cache = Cache(daemon.stub(), name, layers=3, shared=True)
    opened = kv.OpenSessionRequest(session=name + "-ids", model=cache.model.name, salt=salt)
    cache.stub = Tenant(cache.stub, tenant)
    cache.stub.OpenSession(opened, timeout=TIMEOUT)
    cache.name = name + "-ids"
    ids = [int(x) for x in np.random.default_rng(5).integers(0, 1 << 32, 500)]
    for layer in range(3):
        cache.append(0, *cache.rows(500), layer=layer, token_ids=ids)
    return cache, ids


def matched(stub, cache, ids, **fields):
    answer = stub.Match(kv.MatchRequest(model=cache.model.name, token_ids=ids, **fields), timeout=TIMEOUT)
    return answer.session, answer.tokens


def read_ids(cache, begin=0, end=0):
    request = kv.GetSessionRequest(session=cache.name, token_ids={"begin": begin, "end": end})
    return list(cache.stub.GetSession(request, timeout=TIMEOUT).token_ids)


def test_ids_are_read(daemon):
    cache, ids = with_ids(daemon, "read")
    assert read_ids(cache) == ids and read_ids(cache, 70, 300) == ids[70:300] and read_ids(cache, 480, 999) == ids[480:]
    assert read_ids(cache, 500) == [] and list(cache.info().token_ids) == []
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "token_ids.begin is 5, token_ids.end is 4"):
        read_ids(cache, 5, 4)


@pytest.mark.parametrize("cut", [None, 0, 256, 320])
def test_a_copy_is_matched(daemon, other, cut):
    cache, ids = with_ids(daemon, f"copied-{cut}")
    moved = Moved(cache, other)
    copy(daemon, cache, other)
    if cut is not None:
        moved.stub.Truncate(kv.TruncateRequest(session=cache.name, position=cut), timeout=TIMEOUT)
        copy(daemon, cache, other)
    assert_same(cache, moved)
    assert read_ids(moved) == ids
    assert matched(moved.stub, cache, ids) == (cache.name, 448)


def test_a_session_that_has_changed_since_it_was_copied(daemon, other, tmp_path):
    """Its new rows do not go behind the old ones of the target."""
    cache, ids = with_ids(daemon, "changed")
    moved = Moved(cache, other)
    copy(daemon, cache, other)
    cache.stub.Truncate(kv.TruncateRequest(session=cache.name, position=100), timeout=TIMEOUT)
    anew = ids[:100] + [id + 1 for id in ids[100:]] + [7] * 100
    for layer in range(3):
        cache.append(100, *cache.rows(len(anew) - 100), layer=layer, token_ids=anew[100:])
    path = str(tmp_path / "changed.qkvs")
    save(daemon, cache, path)
    for command in (["copy", cache.name, "--to", other.target, "--target", daemon.target],
                    ["load", path, "--target", other.target]):
        result = run("qkvctl", *command)
        assert result.returncode == 1 and "has another token at position 100; truncate it to 64" in result.stderr
    assert read_ids(moved) == ids
    moved.stub.Truncate(kv.TruncateRequest(session=cache.name, position=64), timeout=TIMEOUT)
    copy(daemon, cache, other)
    assert_same(cache, moved)
    assert read_ids(moved) == anew


def save(daemon, cache, path):
    json_lines("qkvctl", "fetch", cache.name, "--coded", "--output", path, "--target", daemon.target)


def test_a_file_has_the_ids(daemon, other, tmp_path):
    cache, ids = with_ids(daemon, "saved", salt=b"s 1")
    path = str(tmp_path / "session.qkvs")
    save(daemon, cache, path)
    json_lines("qkvctl", "load", path, "--session", "unsalted", "--target", other.target)
    assert matched(other.stub(), cache, ids) == matched(other.stub(), cache, ids, salt=b"s 1") == ("", 0)
    json_lines("qkvctl", "load", path, "--salt", "s 1", "--target", other.target)
    moved = Moved(cache, other)
    assert_same(cache, moved)
    assert read_ids(moved) == ids
    assert matched(moved.stub, cache, ids, salt=b"s 1") == (cache.name, 448)


def test_files_of_formats(daemon, other, tmp_path):
    """Format 1 has no ids."""
    cache = Cache(daemon.stub(), "formats", layers=3)
    for layer in range(3):
        cache.append(0, *cache.rows(200), layer=layer)
    path = tmp_path / "session.qkvs"
    save(daemon, cache, str(path))
    whole = bytearray(path.read_bytes())
    assert whole[4] == 2
    for number in 0, 3:
        whole[4] = number
        path.write_bytes(whole)
        result = run("qkvctl", "load", str(path), "--target", other.target)
        assert result.returncode == 1 and f"its format is {number}, known are 1 to 2" in result.stderr
    whole[4] = 1
    path.write_bytes(whole)
    json_lines("qkvctl", "load", str(path), "--target", other.target)
    assert_same(cache, Moved(cache, other))


def test_ids_that_end_before_the_pages(daemon, other):
    cache, ids = with_ids(daemon, "partly")
    for layer in range(3):
        cache.append(500, *cache.rows(300), layer=layer)
    copy(daemon, cache, other)
    # Those of the page that they end in do not come along.
    assert matched(other.stub(), cache, ids) == (cache.name, 448)


def test_a_salt_is_not_lost(daemon, other):
    cache, ids = with_ids(daemon, "salted", salt=b"s 1", tenant="t")
    for name, more in (("unsalted", ()), ("wrong", ("--salt", "s 2"))):
        copy(daemon, cache, other, "--tenant", "t", "--session", name, *more)
        for salt in (b"", b"s 1", b"s 2"):
            assert matched(other.stub(), cache, ids, salt=salt, tenant="t") == ("", 0)
    copy(daemon, cache, other, "--tenant", "t", "--session", "right", "--salt", "s 1")
    assert matched(other.stub(), cache, ids, salt=b"s 1", tenant="t") == ("right", 448)
    assert matched(other.stub(), cache, ids, tenant="t") == ("", 0)


def test_pages_of_another_layer(daemon):
    cache, _ = with_ids(daemon, "layers")
    cache.stub.OpenSession(kv.OpenSessionRequest(session="other-layer", model=cache.model.name), timeout=TIMEOUT)
    pieces = cache.stub.Fetch(kv.FetchRequest(session=cache.name, layers=[1], coded=True), timeout=TIMEOUT)
    pages = [page for piece in pieces for page in piece.pages]
    for layer in 0, 2:
        with refused(grpc.StatusCode.INVALID_ARGUMENT, f"pages[0].image is of layer 1, expected {layer}"):
            item = kv.Item(session="other-layer", layer=layer, pages=pages)
            cache.stub.Append(iter([kv.AppendRequest(items=[item])]), timeout=TIMEOUT)
    for name in cache.name, "other-layer":
        cache.stub.CloseSession(kv.CloseSessionRequest(session=name), timeout=TIMEOUT)


def test_pages_with_ids(daemon):
    cache, ids = with_ids(daemon, "pages")
    pages = []
    for layer in range(3):
        pieces = cache.stub.Fetch(kv.FetchRequest(session=cache.name, layers=[layer], coded=True), timeout=TIMEOUT)
        pages.append([page for piece in pieces for page in piece.pages])
    cache.stub.OpenSession(kv.OpenSessionRequest(session="again", model=cache.model.name), timeout=TIMEOUT)

    def append(given):
        items = [kv.Item(session="again", layer=layer, pages=pages[layer], token_ids=given) for layer in range(3)]
        cache.stub.Append(iter([kv.AppendRequest(items=items)]), timeout=TIMEOUT)

    tokens = sum(page.tokens for page in pages[0])
    with refused(grpc.StatusCode.INVALID_ARGUMENT, f"token_ids has 5 entries, pages have {tokens} tokens"):
        append(ids[:5])
    again = Moved(cache, daemon)
    again.name = "again"
    assert list(again.info().lengths) == [0] * 3
    append(ids[:tokens])
    assert read_ids(again) == ids[:tokens]
    with refused(grpc.StatusCode.ALREADY_EXISTS, "position 7 has token id"):
        append(ids[:7] + [ids[7] ^ 1] + ids[8:tokens])
    cache.stub.CloseSession(kv.CloseSessionRequest(session=cache.name), timeout=TIMEOUT)
    assert matched(cache.stub, cache, ids) == ("again", tokens // 64 * 64)
