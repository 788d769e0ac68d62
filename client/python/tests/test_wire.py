"""The messages made by hand are those that the generated classes make, and broken ones are refused."""

import contextlib

import numpy as np
import pytest

import qkvd
from qkvd import items, wire
from qkvd.v1 import kv_cache_pb2 as kv
from qkvd.v1 import tensor_pb2


def tensor(array):
    return tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FP32, dims=array.shape, data=array.tobytes())


@pytest.fixture(params=["small", "large"])
def by(request, monkeypatch):
    """Small messages are made by generated classes, large ones by hand: the same is asked of both."""
    monkeypatch.setattr(wire, "SMALL_BYTES", {"small": 1 << 30, "large": 0}[request.param])


@pytest.fixture
def item(by, rows, queries):
    k, v = rows(40)
    return qkvd.Item(session="s", layer=3, position=70000, k=k, v=v, q=queries(40), rope="before", tokens=range(40))


def generated(item):
    return kv.Item(
        session=item.session, layer=item.layer, position=item.position, k_rope=2, q_rope=2, token_ids=item.tokens,
        k=tensor(item.k), v=tensor(item.v), q=tensor(item.q),
    )  # fmt: skip


def test_requests(item):
    made = items.attend_message([item, item], "fp16", 5)
    assert kv.AttendRequest.FromString(made) == kv.AttendRequest(items=[generated(item)] * 2, out_dtype=2, id=5)
    (made,) = items.append_messages([items.pack(item)])
    assert kv.AppendRequest.FromString(made) == kv.AppendRequest(items=[generated(item)])


def test_strides(item):
    turned = np.ascontiguousarray(item.k.transpose(1, 0, 2)).transpose(1, 0, 2)
    made = kv.AppendRequest.FromString(
        b"".join(items.append_messages([items.pack(qkvd.Item(session="s", k=turned, v=item.v))]))
    )
    assert made.items[0].k.strides == list(turned.strides)
    assert made.items[0].k.data == item.k.transpose(1, 0, 2).tobytes()


def test_answers(by, queries):
    out = queries(3)
    answer = kv.AttendResponse(
        results=[
            kv.AttendResult(length=300, out=tensor(out), lse=tensor(out[..., 0])),
            kv.AttendResult(status=tensor_pb2.Status(code=5, message="no such session")),
        ],
        id=2**40,
    ).SerializeToString()
    first, second = wire.attend_results(answer)
    assert first.length == 300 and np.array_equal(first.out, out) and np.array_equal(first.lse, out[..., 0])
    assert (second.code, second.text, second.out) == (5, "no such session", None)
    assert first.out.base is not None  # a view
    rows = wire.rows(kv.FetchResponse(layer=2, position=9, k=tensor(out), v=tensor(out)).SerializeToString())
    assert (rows.layer, rows.position) == (2, 9) and np.array_equal(rows.v, out)
    for end in range(len(answer)):
        with contextlib.suppress(qkvd.Internal):
            wire.attend_results(answer[:end])
            kv.AttendResponse.FromString(answer[:end])  # then it is one


@pytest.mark.parametrize("position", range(60))
def test_answers_with_a_changed_byte(by, queries, position):
    """Read or refused, nothing else."""
    answer = bytearray(kv.AttendResponse(results=[kv.AttendResult(length=7, out=tensor(queries(1)))]).SerializeToString())
    for value in range(256):
        answer[position] = value
        with contextlib.suppress(qkvd.Internal):
            wire.attend_results(bytes(answer))


@pytest.mark.parametrize(
    "ids",
    [
        [], [0], [127, 128, 16383, 16384, 2**28 - 1], [2**28, 1], [2**32 - 1, 0], [np.int64(7)], np.arange(5),
        np.arange(10, dtype=np.uint32)[::3], tuple(range(1000)),
        list(range(0, 2**28, 9973)), [*range(20000), 2**28, *range(20000)], np.arange(20000, dtype=np.uint32),
    ],
)  # fmt: skip
def test_token_ids(ids):
    model = kv.MatchRequest(model="m").SerializeToString()
    message = kv.MatchRequest.FromString(wire.token_ids(3, ids, before=model))
    assert message.model == "m"
    assert list(message.token_ids) == [int(one) for one in ids]


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], ["a"], np.array([1.5])])
def test_token_ids_that_are_none(ids):
    with pytest.raises(qkvd.InvalidArgument, match="token ids are whole numbers from 0 to 4294967295"):
        wire.token_ids(3, ids)
