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


def test_opaque_keeps_rows_as_bytes(daemon):
    chunks = chunks_of(daemon, opaque=True, heads=7, bits=4, tenant="alice")
    was = filled((2, 64, 576), torch.bfloat16)
    came = torch.zeros_like(was)
    assert chunks.put("latent", was, "m") and chunks.has(["latent"]) == [True] and chunks.get("latent", came)
    assert torch.equal(came, was)
    assert [info.object for info in chunks.client.objects()] == ["latent"]


def test_what_does_not_fit_is_a_miss(daemon):
    chunks = chunks_of(daemon)
    assert chunks.put("fits", filled((100,), torch.uint8), "m")
    assert not chunks.get("fits", torch.zeros(50, dtype=torch.uint8))
    assert not chunks.get("fits", torch.zeros(200, dtype=torch.uint8))
    assert not chunks_of(daemon, heads=7).put("odd", filled((3, 100, HEADS * 2 * DIM), torch.float32), "m")
    with pytest.raises(qkvd.InvalidArgument, match="kv_heads is 0"):
        chunks_of(daemon, heads=0)
