"""Chunks of any form, in a real daemon: rows are sessions, all else is an opaque object."""

import logging

import pytest
from daemon import Daemon

torch = pytest.importorskip("torch")

import qkvd  # noqa: E402
from qkvd.chunks import Chunks  # noqa: E402
from qkvd.prefixes import Options  # noqa: E402

HEADS, DIM = 2, 64


@pytest.fixture(scope="module")
def daemon():
    with Daemon() as running:
        yield running


def chunks_of(daemon, *, opaque=False, heads=HEADS, **settings):
    options = Options.of({"target": daemon.target, "bits": "exact"} | settings)
    return Chunks(options, heads, logging.getLogger("test"), opaque=opaque)


def filled(shape, dtype):
    tensor = torch.zeros(shape, dtype=dtype)
    tensor.view(-1).view(torch.uint8).random_(0, 256) if dtype not in (torch.float32, torch.bfloat16) else tensor.normal_()
    return tensor


@pytest.mark.parametrize(
    "shape, dtype, rows",
    [
        ((3, 100, HEADS * 2 * DIM), torch.float32, True),
        ((2, 3, 64, HEADS * DIM), torch.bfloat16, True),
        ((3, 100, HEADS * 2 * 4), torch.float32, False),  # heads that the daemon does not code
        ((3, 100, 7), torch.float8_e4m3fn, False),
        ((5, 3), torch.float32, False),  # a state
        ((12345,), torch.uint8, False),
        ((1500, 1000), torch.bfloat16, False),
    ],
)
def test_any_form_comes_back(daemon, shape, dtype, rows):
    chunks, again = chunks_of(daemon), chunks_of(daemon)
    name = chunks.name("key", shape, str(dtype))
    was, came = filled(shape, dtype), torch.zeros(shape, dtype=dtype)
    before = chunks.client.metrics()
    assert chunks.has([name]) == [False] and not chunks.get(name, came)
    assert chunks.put(name, was, "m") and again.put(name, was, "m")
    assert again.has([name, "none", name]) == [True, False, True]
    assert again.get(name, came)
    assert torch.equal(came.view(-1).view(torch.uint8), was.view(-1).view(torch.uint8))
    after = chunks.client.metrics()
    assert after["qkvd_objects"] - before["qkvd_objects"] == (0 if rows else 1)
    assert after["qkvd_sessions"] - before["qkvd_sessions"] == (1 if rows else 0)
    assert chunks.size(name) == (0 if rows else was.numel() * was.element_size())
    assert again.delete([name, "none"]) == [True, False] and chunks.has([name]) == [False]


def test_health():
    with Daemon() as daemon:
        chunks = chunks_of(daemon)
        assert chunks.healthy()
        with daemon.stopped():
            assert not chunks.healthy()
        daemon.kill()
        assert not chunks.healthy()
        chunks.close()


def test_many_at_once(daemon, monkeypatch):
    """Rows and bytes side by side, objects several to a call; one that does not fit is a miss by itself."""
    monkeypatch.setattr("qkvd.chunks.BATCH_BYTES", 25_000)
    chunks = chunks_of(daemon)
    calls = []
    put = chunks.client.put_objects
    monkeypatch.setattr(chunks.client, "put_objects", lambda some, **more: calls.append(len(some)) or put(some, **more))
    shapes = [(3, 100, HEADS * 2 * DIM) if place % 4 == 0 else (10_000,) for place in range(12)]
    was = [filled(shape, torch.float32 if len(shape) > 1 else torch.uint8) for shape in shapes]
    assert chunks.put_all([(f"many{place}", one, "m") for place, one in enumerate(was)]) == [True] * 12
    assert sorted(calls) == [1, 2, 2, 2, 2]
    monkeypatch.setattr("qkvd.chunks.BATCH_BYTES", 1 << 20)
    came = [torch.zeros_like(one) for one in was]
    came[5], came[8] = torch.zeros(50, dtype=torch.uint8), torch.zeros(3, 50, HEADS * 2 * DIM)
    names = [f"many{place}" if place != 2 else "nobody's" for place in range(12)]
    assert chunks.get_all(list(zip(names, came, strict=True))) == [place not in (2, 5, 8) for place in range(12)]
    for place in set(range(12)) - {2, 5, 8}:
        assert torch.equal(came[place], was[place])
    assert chunks.put_all([]) == chunks.get_all([]) == []
    chunks.close()


def test_opaque_keeps_rows_as_bytes(daemon):
    chunks = chunks_of(daemon, opaque=True, heads=7, bits=4, tenant="alice")
    was = filled((2, 64, 576), torch.bfloat16)
    came = torch.zeros_like(was)
    assert chunks.put("latent", was, "m") and chunks.has(["latent"]) == [True] and chunks.get("latent", came)
    assert torch.equal(came, was)
    assert [info.object for info in chunks.client.objects()] == ["latent"]


def test_rows_and_bytes_are_not_found_for_each_other(daemon):
    """What a lookup finds, a load gets."""
    rows, opaque = chunks_of(daemon), chunks_of(daemon, opaque=True)
    was = filled((3, 64, HEADS * 2 * DIM), torch.float32)
    for mine, others in ((rows, opaque), (opaque, rows)):
        name = mine.name("both", mine.opaque)
        assert mine.put(name, was, "m") and mine.has([name]) == [True]
        assert others.has([others.name("both", mine.opaque)]) == [False]


def test_what_does_not_fit_is_a_miss(daemon):
    chunks = chunks_of(daemon)
    assert chunks.put("fits", filled((100,), torch.uint8), "m")
    assert not chunks.get("fits", torch.zeros(50, dtype=torch.uint8))
    assert not chunks.get("fits", torch.zeros(200, dtype=torch.uint8))
    assert not chunks_of(daemon, heads=7).put("odd", filled((3, 100, HEADS * 2 * DIM), torch.float32), "m")
    with pytest.raises(qkvd.InvalidArgument, match="kv_heads is 0"):
        chunks_of(daemon, heads=0)
