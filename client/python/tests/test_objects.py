"""Opaque objects."""

import asyncio
import os

import numpy as np
import pytest

import qkvd
from qkvd import objects
from qkvd.v1 import objects_pb2

PART = 1 << 20


@pytest.fixture(params=[True, False], ids=["checksums", "plain"])
def checksums(request, monkeypatch):
    """With the module xxhash, where it is installed, and without."""
    if not request.param:
        monkeypatch.setattr(objects, "checksum", None)
    elif objects.checksum is None:
        pytest.skip("xxhash is not installed")


def test_out_comes_what_went_in(client, name, checksums):
    data = {f"{name}-{size}": os.urandom(size) for size in (1, 70_000, 900_000, PART - 1, PART, PART + 1, 5 * PART + 3, 17)}
    assert client.put_objects(data.items()).objects == len(data)
    assert client.put_objects(data.items()).existing == len(data)
    names = [*data, "nobody", next(iter(data))]
    found = client.get_objects(names)
    assert [None if one is None else bytes(one) for one in found] == [data.get(one) for one in names]
    assert client.has_objects(names, touch=True) == [len(data.get(one, b"")) for one in names]
    assert sorted(data) == [info.object for info in client.objects(name)]
    assert client.delete_objects(names) == [True] * len(data) + [False] * 2
    assert client.get_object(names[0]) is None
    assert client.get_objects([]) == [] and client.put_objects([]).objects == 0


def test_memory_of_the_caller(client, name):
    array = np.arange(300_000, dtype=np.float32).reshape(3, -1)
    client.put_object(name, array, retention="evict", ttl=60)
    into = np.zeros_like(array)
    (view,) = client.get_objects([name], out=[into])
    assert view.nbytes == array.nbytes and (into == array).all()
    with pytest.raises(qkvd.InvalidArgument, match="has 1200000 bytes, its place in out 8"):
        client.get_objects([name], out=[bytearray(8)])
    with pytest.raises(qkvd.InvalidArgument, match="out has 0 entries"):
        client.get_objects([name], out=[])
    for out, text in ((5, "bytes-like"), (np.zeros((8, 2))[:, 0], "contiguous"), (bytes(array.nbytes), "written to")):
        with pytest.raises(qkvd.InvalidArgument, match=f"out of object {name}.*{text}"):
            client.get_objects([name], out=[out])


def test_refusals(client, daemon, name):
    client.put_object(name, b"one")
    with pytest.raises(qkvd.AlreadyExists, match=f"object {name}: another one of 3 bytes"):
        client.put_object(name, b"two")
    client.put_object(name, b"two", replace=True)
    assert bytes(client.get_object(name)) == b"two"
    with qkvd.Client(daemon.target, tenant="other") as other:
        assert other.has_objects([name]) == [0] and other.get_object(name) is None
        other.put_object(name, b"theirs")
        assert bytes(client.get_object(name)) == b"two" and bytes(other.get_object(name)) == b"theirs"
        assert [info.tenant for info in other.objects(name)] == ["other"]
        assert other.delete_objects([name]) == [True] and client.has_objects([name]) == [3]
    for error, text, data, options in (
        (qkvd.InvalidArgument, "has no bytes", b"", {}),
        (qkvd.InvalidArgument, "object x: ", "text", {}),
        (qkvd.InvalidArgument, "retention is 'x'", b"x", {"retention": "x"}),
        (qkvd.InvalidArgument, "durability is 'x'", b"x", {"durability": "x"}),
        (qkvd.FailedPrecondition, "the daemon has no data-dir", b"x", {"durability": "sync"}),
    ):
        with pytest.raises(error, match=text):
            client.put_object("x", data, **options)
    assert client.has_objects(["x"]) == [0]


def test_a_wrong_checksum_is_seen_on_both_sides(client, name, monkeypatch):
    monkeypatch.setattr(objects, "checksum", lambda data: 7)
    with pytest.raises(qkvd.InvalidArgument, match="checksum is 0000000000000007"):
        client.put_object(name, b"abc")
    monkeypatch.setattr(objects, "checksum", None)
    client.put_object(name, b"abc")
    monkeypatch.setattr(objects, "checksum", lambda data: 7)
    with pytest.raises(qkvd.DataLoss, match="does not have its checksum"):
        client.get_object(name)


@pytest.mark.parametrize("then", ["the end", "another", "missing"])
def test_an_object_that_does_not_come_whole(then):
    """Of three bytes two: whatever follows, the object is not taken for one."""
    gathering = objects.Gathering(["a", "b"])
    begin = {"info": objects_pb2.ObjectInfo(object="a", bytes=3), "data": b"xy"}
    pieces = [objects_pb2.GetPiece(index=0, **begin)]
    if then != "the end":
        pieces.append(objects_pb2.GetPiece(index=1, **({"missing": True} if then == "missing" else begin)))
    with pytest.raises(qkvd.Internal, match="of object a 2 of 3 bytes have come"):
        gathering.take(objects_pb2.GetObjectsResponse(pieces=pieces).SerializeToString())
        gathering.all()


def test_an_object_that_turns_out_to_be_damaged():
    gathering = objects.Gathering(["a"])
    begin = objects_pb2.GetPiece(info=objects_pb2.ObjectInfo(object="a", bytes=3), data=b"xy")
    pieces = [begin, objects_pb2.GetPiece(missing=True)]
    gathering.take(objects_pb2.GetObjectsResponse(pieces=pieces).SerializeToString())
    assert gathering.all() == [None]


def test_a_generator_that_raises_leaves_nothing_half(client, name):
    def broken():
        yield f"{name}-1", b"abc"
        raise ValueError("broken")

    with pytest.raises(qkvd.Error) as failure:
        client.put_objects(broken())
    assert isinstance(failure.value.__cause__, ValueError)
    assert client.has_objects([f"{name}-1"]) in ([0], [3])


def test_async(daemon, name):
    async def run():
        async with qkvd.AsyncClient(daemon.target) as client:
            data = os.urandom(3 * PART)
            await client.put_object(name, data)
            assert bytes(await client.get_object(name)) == data
            assert await client.has_objects([name, "nobody"]) == [len(data), 0]
            assert [info.object async for info in client.objects(name)] == [name]
            with pytest.raises(qkvd.AlreadyExists):
                await client.put_object(name, b"other")
            assert await client.delete_objects([name]) == [True]
            assert await client.get_object(name) is None

    asyncio.run(run())
