"""Opaque objects: bytes with a name, whole or not there, in the budgets of sessions."""

import glob
import json
import os
import subprocess
import threading
import time

import grpc
import pytest

from daemon import BIN_DIR, PATIENCE, SANITIZED, Daemon, binary, clean_environment, wait_for
from kv import TIMEOUT, Cache, refused
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import objects_pb2 as pb
from qkv.v1 import objects_pb2_grpc

NONE, MEMORY, SSD = (pb.HasObjectsResponse.PRESENCE_NONE, pb.HasObjectsResponse.PRESENCE_MEMORY,
                     pb.HasObjectsResponse.PRESENCE_SSD)
PART = 1 << 20
EVICT, SYNC, ASYNC = kv.RETENTION_EVICT, kv.DURABILITY_SYNC, kv.DURABILITY_ASYNC


class Objects:
    """The calls, with bytes in and out."""

    def __init__(self, daemon):
        self.stub = objects_pb2_grpc.ObjectsStub(daemon.channel())

    @staticmethod
    def messages(objects, piece=700_000, replace=False, **fields):
        for name, data in objects:
            begin = pb.ObjectInfo(object=name, bytes=len(data), **fields)
            for at in range(0, max(len(data), 1), piece):
                first = {"begin": begin, "replace": replace} if at == 0 else {}
                yield pb.PutObjectsRequest(pieces=[pb.PutPiece(data=data[at:at + piece], **first)])

    def put(self, *objects, **fields):
        answer = self.stub.PutObjects(self.messages(objects, **fields), timeout=TIMEOUT)
        return answer.objects, answer.existing

    def get(self, *names, tenant=""):
        found = [None] * len(names)
        sizes = {}
        for answer in self.stub.GetObjects(pb.GetObjectsRequest(tenant=tenant, objects=names), timeout=TIMEOUT):
            assert answer.ByteSize() < PART + 1000000
            for piece in answer.pieces:
                if piece.HasField("info"):
                    assert found[piece.index] is None
                    found[piece.index], sizes[piece.index] = b"", piece.info.bytes
                if piece.missing:
                    found[piece.index], sizes[piece.index] = None, None
                else:
                    found[piece.index] += piece.data
        assert all(data is None or len(data) == sizes[i] for i, data in enumerate(found))
        return found

    def has(self, *names, **fields):
        return list(self.stub.HasObjects(pb.HasObjectsRequest(objects=names, **fields), timeout=TIMEOUT).presence)

    def delete(self, *names, **fields):
        return list(self.stub.DeleteObjects(pb.DeleteObjectsRequest(objects=names, **fields), timeout=TIMEOUT).deleted)

    def list(self, **fields):
        return self.stub.ListObjects(pb.ListObjectsRequest(**fields), timeout=TIMEOUT)


@pytest.fixture
def objects(daemon):
    return Objects(daemon)


def swallow(function, *arguments, **fields):
    """A call that the daemon's end may cut off."""
    try:
        function(*arguments, **fields)
    except grpc.RpcError:
        pass


def rest(size):
    """Bytes that zstd does not make smaller."""
    return os.urandom(size)


@pytest.mark.parametrize("size", [1, 4095, PART - 1, PART, PART + 1, 3 * PART + 17])
@pytest.mark.parametrize("piece", [1000, 1 << 21])
def test_what_is_put_is_got(objects, name, size, piece):
    if size > PART and piece == 1000:
        piece = 99_991
    data = rest(size)
    assert objects.put((name, data), piece=piece) == (1, 0)
    assert objects.get(name) == [data]
    info, = objects.list(prefix=name).objects
    assert (info.object, info.tenant, info.bytes, info.bytes_in_memory) == (name, "default", size, size)


def test_many_in_one_call(objects, name):
    data = {f"{name}-{i}": rest(1 + 7919 * i % 300_000) for i in range(200)}
    assert objects.put(*data.items()) == (200, 0)
    names = [*data, "nobody", *reversed(data)]
    assert objects.get(*names) == [data.get(one) for one in names]
    assert objects.has(*names) == [MEMORY] * 200 + [NONE] + [MEMORY] * 200
    assert objects.get() == [] and objects.has() == []
    # In one message, too.
    pieces = [pb.PutPiece(begin=pb.ObjectInfo(object=f"{name}/{i}", bytes=3), data=b"abc") for i in range(100)]
    answer = objects.stub.PutObjects(iter([pb.PutObjectsRequest(pieces=pieces)]), timeout=TIMEOUT)
    assert answer.objects == 100 and objects.get(f"{name}/99") == [b"abc"]
    assert objects.delete(*data, "nobody") == [True] * 200 + [False]
    assert objects.has(*data) == [NONE] * 200


def test_an_object_is_whole_or_not_there(daemon, objects, name):
    data = rest(3 * PART)
    before = daemon.metric("qkvd_objects_incomplete_total")
    memory = daemon.metric("qkvd_object_memory_bytes")

    def part():
        yield from list(objects.messages([(name, data)]))[:-1]

    with refused(grpc.StatusCode.FAILED_PRECONDITION, f"object {name} has 2800000 of its 3145728 bytes"):
        objects.stub.PutObjects(part(), timeout=TIMEOUT)
    seen, go_on = threading.Event(), threading.Event()

    def slowly():
        for number, message in enumerate(objects.messages([(name, data)])):
            if number == 2:
                seen.set()
                go_on.wait(PATIENCE)
            yield message

    call = objects.stub.PutObjects.future(slowly(), timeout=TIMEOUT)
    assert seen.wait(PATIENCE)
    wait_for(lambda: daemon.metric("qkvd_object_memory_bytes") > memory + PART, "the first part has not come")
    assert objects.has(name) == [NONE] and objects.get(name) == [None] and not objects.list(prefix=name).objects
    call.cancel()
    go_on.set()
    wait_for(lambda: daemon.metric("qkvd_objects_incomplete_total") == before + 2, "the object is not dropped")
    wait_for(lambda: daemon.metric("qkvd_object_memory_bytes") == memory, "memory is not given back")


def test_one_name_is_one_object(objects, name):
    assert objects.put((name, b"one")) == (1, 0)
    assert objects.put((name, b"one")) == (1, 1)  # sent again
    with refused(grpc.StatusCode.ALREADY_EXISTS, f"object {name}: another one of 3 bytes has the name"):
        objects.put((name, b"two"))
    assert objects.get(name) == [b"one"]
    assert objects.put((name, b"three"), replace=True) == (1, 0)
    assert objects.get(name) == [b"three"]
    assert objects.put((name, b"theirs"), tenant="other") == (1, 0)
    assert objects.get(name) == [b"three"] and objects.get(name, tenant="other") == [b"theirs"]
    assert objects.delete(name, tenant="other") == [True]
    assert objects.get(name) == [b"three"] and objects.has(name, tenant="other") == [NONE]


def test_a_checksum_that_does_not_fit(objects, name):
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "checksum is 0000000000000001, that of its bytes"):
        objects.put((name, b"abc"), checksum=1)
    assert objects.has(name) == [NONE]
    objects.put((name, b"abc"))
    checksum = objects.list(prefix=name).objects[0].checksum
    assert checksum == 0x78AF5F94892F3950  # XXH3-64 of "abc"
    assert objects.put((name + "2", b"abc"), checksum=checksum) == (1, 0)


def put_raw(objects, *pieces):
    return objects.stub.PutObjects(iter([pb.PutObjectsRequest(pieces=pieces)]), timeout=TIMEOUT)


@pytest.mark.parametrize("fields, status, texts", [
    ({"object": ""}, grpc.StatusCode.INVALID_ARGUMENT, ["pieces[0]: begin: object is empty"]),
    ({"object": "no name"}, grpc.StatusCode.INVALID_ARGUMENT, ["object has byte 0x20 at 2"]),
    ({"tenant": "a b"}, grpc.StatusCode.INVALID_ARGUMENT, ["tenant has byte 0x20"]),
    ({"bytes": 0}, grpc.StatusCode.INVALID_ARGUMENT, ["bytes is 0, allowed are 1 to limit-object-bytes 1073741824"]),
    ({"bytes": 2**40}, grpc.StatusCode.INVALID_ARGUMENT, ["bytes is 1099511627776, allowed are 1"]),
    ({"bytes": 2}, grpc.StatusCode.INVALID_ARGUMENT, ["data has 3 bytes, object a has 2 to come"]),
    ({"retention": 9}, grpc.StatusCode.INVALID_ARGUMENT, ["retention is 9"]),
    ({"durability": 7}, grpc.StatusCode.INVALID_ARGUMENT, ["durability is 7"]),
    ({"durability": SYNC}, grpc.StatusCode.FAILED_PRECONDITION, ["durability is SYNC, the daemon has no data-dir"]),
])
def test_bad_input(objects, fields, status, texts):
    with refused(status, *texts):
        put_raw(objects, pb.PutPiece(begin=pb.ObjectInfo(**{"object": "a", "bytes": 3, **fields}), data=b"abc"))
    assert objects.has("a") == [NONE]


def test_pieces_out_of_order(objects, name):
    begin = pb.ObjectInfo(object=name, bytes=5)
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "pieces[0]: data has 3 bytes, no object begins"):
        put_raw(objects, pb.PutPiece(data=b"abc"))
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "pieces[1]: begin: ", "has 3 of its 5 bytes, and another begins"):
        put_raw(objects, pb.PutPiece(begin=begin, data=b"abc"), pb.PutPiece(begin=begin, data=b"abc"))
    assert objects.has(name) == [NONE]
    assert put_raw(objects).objects == 0
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "objects has 16385 entries, at most 16384"):
        objects.has(*["a"] * 16385)
    assert objects.has(*["a" * 128] * 16384) == [NONE] * 16384
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "objects[1]: the name"):
        objects.get("a", "b c")
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "page_size is 1001"):
        objects.list(page_size=1001)


def test_a_message_of_very_many_objects_leaves_threads_to_others():
    many = 1_000_000
    with Daemon("--threads", "1") as daemon:
        objects = Objects(daemon)
        # One name that takes two values in turn.
        two = [pb.PutPiece(begin=pb.ObjectInfo(object="x", bytes=1), replace=True, data=data) for data in (b"a", b"b")]
        message = pb.PutObjectsRequest(pieces=two).SerializeToString() * (many // 2)
        put = daemon.channel().stream_unary("/qkv.v1.Objects/PutObjects", request_serializer=lambda message: message,
                                            response_deserializer=pb.PutObjectsResponse.FromString)
        count = lambda: daemon.metric("qkvd_objects_put_total")  # noqa: E731
        call = put.future(iter([message]), timeout=TIMEOUT)
        wait_for(lambda: count() > 0, "the first of the objects")
        assert objects.put(("other", b"1")) == (1, 0)
        assert count() < many
        call.cancel()
        wait_for(lambda: daemon.metric("qkvd_calls_running") == 1, "the end of the call")  # of GetStatus
        assert count() < many and objects.get("other") == [b"1"]


def test_a_list_comes_in_pages(objects, name):
    names = sorted(f"{name}-{i}" for i in range(25))
    objects.put(*((one, b"x") for one in names))
    listed, token, pages = [], "", 0
    while pages == 0 or token:
        answer = objects.list(prefix=name, page_size=10, page_token=token)
        listed += [info.object for info in answer.objects]
        token, pages = answer.next_page_token, pages + 1
    assert (listed, pages) == (names, 3)


def test_what_is_counted(daemon, objects, name):
    before = {one.name: one.value for one in daemon.status().metrics}
    objects.put((name, rest(2 * PART)), (name + "2", b"x"))
    objects.get(name, "nobody")
    after = {one.name: one.value for one in daemon.status().metrics}
    grown = {key: after[key] - before[key] for key in after if key.startswith("qkvd_object")}
    memory = grown.pop("qkvd_object_memory_bytes")
    assert 2 * PART < memory < 2 * PART + 4096 and after["qkvd_kv_bytes"] - before["qkvd_kv_bytes"] == memory
    assert {key: value for key, value in grown.items() if value} == {
        "qkvd_objects": 2, "qkvd_object_bytes": 2 * PART + 1, "qkvd_objects_put_total": 2,
        "qkvd_object_put_bytes_total": 2 * PART + 1, "qkvd_object_gets_total": 2, "qkvd_object_hits_total": 1,
        "qkvd_object_get_bytes_total": 2 * PART}


def test_an_unused_one_expires(daemon, objects, name):
    before = daemon.metric("qkvd_objects_expired_total")
    objects.put((name, b"x"), ttl_ms=300)
    objects.put((name + "-stays", b"x"))
    wait_for(lambda: objects.has(name) == [NONE], "the object does not expire")
    assert daemon.metric("qkvd_objects_expired_total") == before + 1
    assert objects.has(name + "-stays") == [MEMORY]


def test_the_longest_time_to_live(objects, name):
    objects.put((name, b"x"), ttl_ms=(1 << 64) - 1)
    objects.put((name + "-short", b"x"), ttl_ms=1)
    wait_for(lambda: objects.has(name + "-short") == [NONE], "it expires")
    assert objects.get(name) == [b"x"]


def test_full_memory_refuses_or_evicts():
    with Daemon("--memory-budget", "32MiB", "--limit-objects", "100") as daemon:
        objects = Objects(daemon)
        kept = [(f"kept-{i}", rest(PART)) for i in range(8)]
        objects.put(*kept)
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "memory-budget is 33554432 bytes"):
            objects.put(*((f"more-{i}", rest(PART)) for i in range(40)))
        more = objects.list(prefix="more").objects
        assert len(more) < 32
        assert all(objects.delete(*(info.object for info in more)))
        for i in range(100):
            objects.put((f"cache-{i}", rest(PART)), retention=EVICT)
            assert objects.get("cache-0") != [None]  # a use
        assert objects.get(*(one for one, _ in kept)) == [data for _, data in kept]
        assert objects.has("cache-99", "cache-0", "cache-50") == [MEMORY, MEMORY, NONE]
        assert daemon.metric("qkvd_objects_evicted_total") >= 70
        # Sessions and objects make headroom for each other.
        cache = Cache(daemon.stub(), "s", layers=1, kv_heads=8, q_heads=8, key_dim=128, value_dim=128)
        cache.append(0, *cache.rows(4096))
        assert objects.has("cache-0") == [MEMORY] or objects.has("cache-0") == [NONE]
        assert objects.get(kept[0][0]) == [kept[0][1]]
        # Places.
        small = [(f"small-{i:03}", b"x") for i in range(300)]
        objects.put(*small, retention=EVICT)
        assert len(objects.list().objects) == 100
        assert objects.has("small-000", "small-299") == [NONE, MEMORY]
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "limit-objects is 100, that many are held"):
            objects.put(*((f"stays-{i}", b"x") for i in range(200)))


def stored(tmp_path, *arguments):
    return Daemon("--data-dir", str(tmp_path), "--memory-budget", "64MiB", "--storage-segment", "4MiB", *arguments)


def test_more_than_memory_goes_to_the_ssd_and_comes_back(tmp_path):
    data = {f"o{i}": rest(3 * PART // 2 + i) for i in range(80)}
    with stored(tmp_path) as daemon:
        objects = Objects(daemon)
        for one in data.items():
            objects.put(one)
        assert set(objects.has(*data)) == {MEMORY, SSD}
        assert objects.get(*data) == list(data.values())
        assert objects.has("o79") == [MEMORY]  # has come back
        big = rest(90 * PART)  # larger than memory
        objects.put(("big", big))
        assert objects.get("big") == [big]
        assert objects.delete("big") == [True]
    with stored(tmp_path) as daemon:
        objects = Objects(daemon)
        assert objects.has(*data, "big") == [SSD] * 80 + [NONE]
        assert objects.get(*data) == list(data.values())
        assert daemon.metric("qkvd_objects_lost_total") == 0


def test_kill(tmp_path):
    data = {f"o{i}": rest(PART + 1000 * i) for i in range(10)}
    with stored(tmp_path) as daemon:
        objects = Objects(daemon)
        objects.put(*data.items(), durability=SYNC, retention=EVICT, ttl_ms=10**9)
        objects.put(("o1", b"another"), durability=SYNC, replace=True)
        assert objects.delete("o0", "o2") == [True, True]
        messages = list(Objects.messages([("half", rest(20 * PART))], durability=ASYNC))

        def half():
            yield from messages[:-1]
            time.sleep(PATIENCE)

        call = objects.stub.PutObjects.future(half())
        wait_for(lambda: daemon.metric("qkvd_object_memory_bytes") > 26 * PART, "half of the object has not come")
        daemon.kill()
        assert call.exception()
    data.update(o1=b"another", o0=None, o2=None, half=None)
    for _ in range(2):
        with stored(tmp_path) as daemon:
            objects = Objects(daemon)
            assert objects.get(*data) == list(data.values())
            info = objects.list(prefix="o9").objects[0]
            assert (info.retention, info.durability, info.ttl_ms) == (EVICT, SYNC, 10**9)
            assert objects.has("o9") == [MEMORY]
            daemon.kill()


def test_a_sync_put_of_what_memory_has(tmp_path):
    """What is here, but perhaps not on the SSD, is no answer to a put that asks for that."""
    data = {f"o{i}": rest(PART + 5) for i in range(6)}
    with Daemon("--data-dir", str(tmp_path)) as daemon:
        objects = Objects(daemon)
        for i, item in enumerate(data.items()):
            objects.put(item, durability=kv.DURABILITY_MEMORY if i % 2 == 0 else ASYNC)
        put, existing = objects.put(*data.items(), durability=SYNC)
        assert put == 6 and existing <= 3  # those of the async ones that are known to be on the SSD meanwhile
        assert objects.put(*data.items(), durability=SYNC) == (6, 6)
        daemon.kill()
    with Daemon("--data-dir", str(tmp_path)) as daemon:
        assert Objects(daemon).get(*data) == list(data.values())
        assert Objects(daemon).put(*data.items(), durability=SYNC) == (6, 6)


def test_kill_while_objects_are_replaced(tmp_path):
    """One of the two is there, whole: what is durable is given up for what is durable."""
    old, new = ({f"o{i}": rest(2 * PART + i) for i in range(4)} for _ in range(2))
    for attempt in range(4):
        directory = tmp_path / str(attempt)
        with Daemon("--data-dir", str(directory)) as daemon:
            objects = Objects(daemon)
            objects.put(*old.items(), durability=SYNC)
            thread = threading.Thread(target=lambda: swallow(objects.put, *new.items(), replace=True, durability=ASYNC))
            thread.start()
            time.sleep(0.004 * attempt)
            daemon.kill()
            thread.join()
        with Daemon("--data-dir", str(directory)) as daemon:
            for name, data in zip(old, Objects(daemon).get(*old)):
                assert data in (old[name], new[name])


def test_replacing_takes_new_settings(objects, name):
    data = rest(1000)
    objects.put((name, data), retention=EVICT, ttl_ms=(1 << 64) - 1)
    assert objects.put((name, data)) == (1, 1)
    assert objects.list(prefix=name).objects[0].retention == EVICT
    assert objects.put((name, data), replace=True) == (1, 0)
    info, = objects.list(prefix=name).objects
    assert (info.retention, info.ttl_ms) == (kv.RETENTION_KEEP, 0) and objects.get(name) == [data]
    assert objects.put((name, data), replace=True) == (1, 1)


def test_kill_between_the_parts_of_async_objects(tmp_path):
    """Of objects that are on their way to the SSD each is whole afterwards, or not there."""
    data = {f"o{i}": rest(5 * PART) for i in range(8)}
    for round_ in range(3):
        with stored(tmp_path) as daemon:
            objects = Objects(daemon)
            for one in data.items():
                objects.put(one, durability=ASYNC, replace=True)
            time.sleep(0.3 * round_)
            daemon.kill()
        with stored(tmp_path) as daemon:
            objects = Objects(daemon)
            found = objects.get(*data)
            assert all(one in (None, data[key]) for key, one in zip(data, found, strict=True))
            objects.delete(*data)


def test_a_damaged_object_is_a_miss(tmp_path):
    data = {f"o{i}": rest(2 * PART) for i in range(8)}
    with stored(tmp_path) as daemon:
        Objects(daemon).put(*data.items(), durability=SYNC)
    # In the middle of the second part of one of them.
    mark = data["o3"][PART + 5000:PART + 5064]
    for path in glob.glob(f"{tmp_path}/segment-*"):
        with open(path, "r+b") as file:
            at = file.read().find(mark)
            if at >= 0:
                file.seek(at)
                file.write(b"damage")
                break
    else:
        raise AssertionError("the part is not found in any segment")
    with stored(tmp_path) as daemon:
        objects = Objects(daemon)
        found = objects.get(*data)
        assert found == [None if one == "o3" else data[one] for one in data]
        assert daemon.metric("qkvd_objects_lost_total") == 1
        assert objects.has("o3") == [NONE]
        assert objects.put(("o3", data["o3"])) == (1, 0)
        assert objects.get("o3") == [data["o3"]]
    with stored(tmp_path) as daemon:
        assert Objects(daemon).get("o3") == [data["o3"]]


def test_zstd_where_it_helps(tmp_path):
    with stored(tmp_path) as daemon:
        objects = Objects(daemon)
        zeros = bytes(8 * PART)
        objects.put(("zeros", zeros), durability=SYNC)
        assert daemon.metric("qkvd_storage_live_bytes") < PART
        assert objects.get("zeros") == [zeros]


def test_a_full_storage_budget_expels(tmp_path):
    with stored(tmp_path, "--storage-budget", "64MiB") as daemon:
        objects = Objects(daemon)
        objects.put(("kept", rest(PART)))
        for i in range(100):
            objects.put((f"o{i}", rest(PART)), retention=EVICT)
            time.sleep(0.02)
        wait_for(lambda: daemon.metric("qkvd_objects_expelled_total") > 0, "nothing is expelled")
        assert objects.get("kept", "o99") != [None, None]
        assert objects.has("kept") != [NONE]


def test_limits_of_a_start(tmp_path):
    with stored(tmp_path) as daemon:
        Objects(daemon).put(*((f"o{i}", b"x") for i in range(10)), durability=SYNC)
    with pytest.raises(AssertionError, match="limit-objects is 5, more are there"):
        with stored(tmp_path, "--limit-objects", "5"):
            pass
    with stored(tmp_path) as daemon:
        assert Objects(daemon).get("o9") == [b"x"]


def test_incomplete_objects_take_no_place_at_a_start(tmp_path):
    """What a crash has left incomplete is dropped, and counts for limit-objects no more."""
    arguments = ("--storage-io", "pread", "--limit-objects")
    with stored(tmp_path, *arguments, "6") as daemon:
        Objects(daemon).put(*((f"o{i}", rest(PART)) for i in range(6)), durability=SYNC)
        daemon.kill()
    # The records of those behind the first segment are gone: their entries in the journal are there.
    paths = glob.glob(f"{tmp_path}/segment-*")
    for path in sorted(paths)[1:]:
        with open(path, "r+b") as file:
            file.write(bytes(os.path.getsize(path)))
    with stored(tmp_path, *arguments, "4") as daemon:
        whole = len(Objects(daemon).list().objects)
        assert 0 < whole < 5 and daemon.metric("qkvd_objects_incomplete_total") == 6 - whole


@pytest.mark.skipif(SANITIZED, reason="a library before libc and sanitizers do not go together")
def test_the_journal_fails(tmp_path):
    """An async put whose entry the journal does not take is told of and counted, and written again later."""
    flag = tmp_path / "fail"
    library = os.path.join(os.path.dirname(BIN_DIR), "tests", "e2e", "failing_disk.so")
    data = {"one": rest(1000), "two": rest(PART + 1)}
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-io", "pread")
    with Daemon(*arguments, environment={"LD_PRELOAD": library, "FAIL_JOURNAL": str(flag)}) as daemon:
        objects = Objects(daemon)
        flag.touch()
        with refused(grpc.StatusCode.UNAVAILABLE, "held, but not durable"):
            objects.put(("two", data["two"]), durability=SYNC)
        assert daemon.metric("qkvd_objects_undurable") == 1
        assert objects.put(("one", data["one"]), durability=ASYNC) == (1, 0)
        wait_for(lambda: daemon.metric("qkvd_objects_undurable") == 2, "the failure is not counted")
        assert daemon.metric("qkvd_objects_incomplete_total") == 0  # it is held, as a whole
        assert objects.get(*data) == list(data.values())
        lines = [json.loads(line) for line in daemon.log_text().splitlines() if "an object is held, but not" in line]
        assert sorted(line["object"] for line in lines) == ["one", "two"] and "tenant" not in lines[0]
        flag.unlink()
        wait_for(lambda: daemon.metric("qkvd_objects_undurable") == 0, "the entries are not written again")

        def synced():
            try:
                return objects.put(*data.items(), durability=SYNC) == (2, 2)  # as they are, with all their parts
            except grpc.RpcError:  # the disk rests
                return False
        wait_for(synced, "the parts do not become durable")
        daemon.kill()
    with Daemon(*arguments) as daemon:
        assert Objects(daemon).get(*data) == list(data.values())


def test_a_reader_that_stalls(daemon, objects, name):
    """What is deleted while somebody has half of it leaves memory, though that one reads no more."""
    before = daemon.metric("qkvd_object_memory_bytes"), daemon.metric("qkvd_objects_stalled_total")
    objects.put((name, rest(48 * PART)))
    call = objects.stub.GetObjects(pb.GetObjectsRequest(objects=[name]), timeout=10 * TIMEOUT)
    first = next(iter(call))
    assert first.pieces[0].info.bytes == 48 * PART
    assert objects.delete(name) == [True]
    assert daemon.metric("qkvd_object_memory_bytes") > before[0] + 40 * PART
    wait_for(lambda: daemon.metric("qkvd_object_memory_bytes") < before[0] + PART, "the reader keeps the memory")
    assert daemon.metric("qkvd_objects_stalled_total") == before[1] + 1
    pieces = [piece for answer in call for piece in answer.pieces]
    assert pieces[-1].missing and sum(len(piece.data) for piece in pieces) < 47 * PART
    assert objects.has(name) == [NONE]


def test_one_look_at_each_object_in_an_eviction(tmp_path):
    """Evicting sessions does not go through all objects for each of them."""
    with Daemon("--data-dir", str(tmp_path), "--memory-budget", "32MiB", "--calibrate-tokens", "0") as daemon:
        objects = Objects(daemon)
        objects.put(*((f"o{i}", b"x") for i in range(300)), durability=SYNC)  # older than all sessions
        for i in range(30):
            cache = Cache(daemon.stub(), f"s{i}", layers=1, durability=SYNC, recent_window=0)
            cache.append(0, *cache.rows(64))
        objects.put(("big", rest(40 * PART)), durability=SYNC)
        assert daemon.metric("qkvd_storage_evicted_bytes_total") > 0
        assert objects.has("o0", "o299") == [SSD, SSD]
        # Each object once, as it leaves; in each pass sessions that have left already are passed over.
        assert 300 < daemon.metric("qkvd_eviction_looks_total") < 3000


def test_an_object_that_stays_is_expelled_with_a_line(tmp_path):
    with stored(tmp_path, "--storage-budget", "64MiB") as daemon:
        objects = Objects(daemon)
        for i in range(90):
            objects.put((f"o{i}", rest(PART)), tenant="blue")
            if daemon.metric("qkvd_objects_expelled_total") > 0:
                break
            time.sleep(0.1)
        wait_for(lambda: daemon.metric("qkvd_objects_expelled_total") > 0, "nothing is expelled")
        lines = [json.loads(line) for line in daemon.log_text().splitlines() if "storage-budget is full" in line]
        assert lines[0]["object"] == "o0" and lines[0]["tenant"] == "blue" and lines[0]["bytes"] == PART
        assert lines[0]["level"] == "warn"


def test_qkvctl(daemon, tmp_path):
    def run(*arguments):
        return subprocess.run([binary("qkvctl"), *arguments, "--target", daemon.target], env=clean_environment(),
                              capture_output=True, text=True, timeout=PATIENCE)

    data = rest(3 * PART // 2)
    (tmp_path / "in").write_bytes(data)
    assert run("put-object", "ctl", str(tmp_path / "in"), "--evict").returncode == 0
    assert run("put-object", "ctl", str(tmp_path / "in")).returncode == 0  # the same bytes
    (tmp_path / "in").write_bytes(b"x")
    other = run("put-object", "ctl", str(tmp_path / "in"))
    assert other.returncode == 1 and "object ctl: another one of 1572864 bytes has the name" in other.stderr
    line, = run("objects", "--prefix", "ctl", "--json").stdout.splitlines()
    info = json.loads(line)
    assert (info["object"], info["bytes"], info["evictable"], info["durability"]) == ("ctl", len(data), True, "memory")
    assert "1.5 MiB" in run("objects", "--prefix", "ctl").stdout
    assert run("get-object", "ctl", "--output", str(tmp_path / "out")).returncode == 0
    assert (tmp_path / "out").read_bytes() == data
    assert run("put-object", "ctl", str(tmp_path / "in"), "--replace").returncode == 0
    assert json.loads(run("get-object", "ctl", "--output", str(tmp_path / "out"), "--json").stdout)["bytes"] == 1
    assert run("rm-object", "ctl").returncode == 0
    gone = run("get-object", "ctl", "--output", str(tmp_path / "out"))
    assert gone.returncode == 1 and "no object ctl" in gone.stderr
    gone = run("rm-object", "ctl", "nobody")
    assert gone.returncode == 1 and "2 of 2 objects were not there" in gone.stderr
    assert run("get-object", "ctl").returncode == 2
    assert run("put-object", "ctl", str(tmp_path / "nothing")).returncode == 1


def test_lists_while_others_change(daemon):
    """Lists give the lock away on the way: what stays is in them once, whatever is put, replaced and deleted meanwhile."""
    objects, stop, wrong = Objects(daemon), threading.Event(), []
    staying = [f"list/stays-{i:04}" for i in range(1500)]
    objects.put(*((name, b"x") for name in staying))

    def change():
        mine = Objects(daemon)
        names = [f"list/{'a' if i % 2 else 'z'}-{i}" for i in range(300)]
        try:
            for turn in range(10000):
                if stop.is_set():
                    break
                mine.put(*((name, bytes([turn % 256])) for name in names), replace=True)
                if turn % 2:
                    mine.stub.DeleteObjects(pb.DeleteObjectsRequest(objects=names), timeout=TIMEOUT)
        except grpc.RpcError as error:
            wrong.append(error)
    changer = threading.Thread(target=change)
    changer.start()
    try:
        for page_size in (1000, 70, 0, 333, 1):
            found, token = [], ""
            while not found or token:
                answer = objects.list(prefix="list/", page_size=page_size, page_token=token)
                names = [info.object for info in answer.objects]
                assert names == sorted(set(names)) and (not found or not names or names[0] > found[-1])
                found += names
                token = answer.next_page_token if page_size != 1 or len(found) < 30 else ""
            if page_size != 1:
                assert [name for name in found if name in set(staying)] == staying
    finally:
        stop.set()
        changer.join()
    assert not wrong
    objects.stub.DeleteObjects(pb.DeleteObjectsRequest(objects=staying), timeout=TIMEOUT)
