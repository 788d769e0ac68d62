"""Devices and systems that refuse: no io_uring, no room, a sync or a read that fails. What is not allowed here is skipped."""

import copy
import ctypes
import json
import os
import resource
import struct
import subprocess
import tempfile
import time

import grpc
import numpy as np
import pytest

from daemon import BIN_DIR, SANITIZED, Daemon, binary, clean_environment, wait_for
from kv import TIMEOUT, Cache, Tenant, refused
from qkv.v1 import admin_pb2, admin_pb2_grpc
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import objects_pb2, objects_pb2_grpc, tensor_pb2

ASYNC, SYNC = kv.DURABILITY_ASYNC, kv.DURABILITY_SYNC
LAYERS = 2
LIBC = ctypes.CDLL(None, use_errno=True)

# Of <linux/prctl.h>, <linux/seccomp.h>, <linux/filter.h>, <sched.h>, <sys/mount.h>.
PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 22, 24, 38
SECCOMP_MODE_FILTER, SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = 2, 0x00050000, 0x7FFF0000
LOAD_WORD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
IO_URING_SETUP, CAP_IPC_LOCK, EPERM, ENOSYS = 425, 14, 1, 38
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE = 0x00020000, 4096, 16384, 1 << 18


def prctl(option, *arguments):
    values = [ctypes.c_ulong(argument) for argument in arguments] + [ctypes.c_ulong(0)] * (4 - len(arguments))
    if LIBC.prctl(ctypes.c_int(option), *values) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def deny_io_uring(error):
    """As container runtimes do it: a seccomp filter, for this process and what it becomes."""
    program = b"".join(struct.pack("HBBI", *row) for row in (
        (LOAD_WORD, 0, 0, 0),  # the call's number
        (JUMP_EQUAL, 0, 1, IO_URING_SETUP),
        (RETURN, 0, 0, SECCOMP_RET_ERRNO | error),
        (RETURN, 0, 0, SECCOMP_RET_ALLOW)))
    rows = ctypes.create_string_buffer(program, len(program))
    filter_program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(rows)))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(filter_program))


def show_instead(file, target):
    """A mount namespace in which `target` is that file."""
    done = [LIBC.unshare(CLONE_NEWNS), LIBC.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None),
            LIBC.mount(str(file).encode(), str(target).encode(), None, ctypes.c_ulong(MS_BIND), None)]
    if any(done):
        raise OSError(ctypes.get_errno(), "mount")


def allowed(before):
    """Whether a process may do that to itself."""
    try:
        return subprocess.run(["true"], preexec_fn=before).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def rows(cache, end, layer=0):
    return cache.fetch(layers=(layer,), range=tensor_pb2.TokenRange(begin=0, end=end))


def fill(cache, tokens, position=0):
    for layer in range(LAYERS):
        cache.append(position, *cache.rows(tokens), layer=layer)


def messages(daemon, text):
    return [line for line in daemon.log_lines() if line["message"] == text]


def serve(daemon):
    """Rows go to the disk and come back."""
    cache = Cache(daemon.stub(), "s", layers=LAYERS, durability=SYNC, recent_window=16)
    fill(cache, 300)
    before = rows(cache, 256)
    cache.stub.CloseSession(kv.CloseSessionRequest(session="s", keep=True))
    assert cache.info().tokens_cold == 300 * LAYERS
    for first, second in zip(before, rows(cache, 256)):
        assert np.array_equal(first, second)


# ---- No io_uring ----

@pytest.mark.parametrize("error, reason", [(EPERM, "a seccomp filter forbids it"), (ENOSYS, "the kernel has none")])
def test_io_uring_is_forbidden(tmp_path, error, reason):
    def before():
        deny_io_uring(error)

    if not allowed(before):
        pytest.skip("seccomp filters are not allowed here")
    with Daemon("--data-dir", str(tmp_path / "data"), before=before) as daemon:
        (line,) = messages(daemon, "io_uring is not used, storage reads and writes with threads")
        assert line["level"] == "warn" and reason in line["reason"], line
        assert messages(daemon, "data directory opened")[0]["io"] == "pread"
        serve(daemon)
    with pytest.raises(AssertionError, match=reason):  # where it is asked for by name, that is the end
        Daemon("--data-dir", str(tmp_path / "data"), "--storage-io", "uring", before=before)


def test_io_uring_is_switched_off(tmp_path):
    setting = tmp_path / "io_uring_disabled"
    setting.write_text("2\n")

    def before():
        show_instead(setting, "/proc/sys/kernel/io_uring_disabled")
        deny_io_uring(EPERM)

    if not allowed(before):
        pytest.skip("mounts are not allowed here, or the kernel has no such setting")
    with Daemon("--data-dir", str(tmp_path / "data"), before=before) as daemon:
        (line,) = messages(daemon, "io_uring is not used, storage reads and writes with threads")
        assert "sysctl kernel.io_uring_disabled" in line["reason"], line
        serve(daemon)


def test_little_memory_may_be_locked(tmp_path):
    """New kernels refuse the registered buffers alone, old ones the ring: both are told, and served."""
    def before():
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
        if os.geteuid() == 0:
            prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK)  # which stands above the limit

    if not allowed(before):
        pytest.skip("the limit of locked memory cannot be lowered here")
    with Daemon("--data-dir", str(tmp_path / "data"), before=before) as daemon:
        lines = messages(daemon, "write buffers are not registered with io_uring")
        lines += messages(daemon, "io_uring is not used, storage reads and writes with threads")
        if messages(daemon, "data directory opened")[0]["io"] == "pread" and "RLIMIT_MEMLOCK" not in str(lines):
            assert lines, daemon.log_text()
            pytest.skip(f"io_uring is not allowed here: {lines[0]}")
        assert lines and "RLIMIT_MEMLOCK is too low" in str(lines[0]), daemon.log_text()
        serve(daemon)


# ---- A sync that fails ----

def failing_disk():
    library = os.path.join(os.path.dirname(BIN_DIR), "tests", "e2e", "failing_disk.so")
    assert os.path.exists(library)
    return library


@pytest.mark.skipif(SANITIZED, reason="a library before libc and sanitizers do not go together")
def test_a_failing_disk_loses_nothing(tmp_path):
    """Pages whose sync failed stay in memory, and are written again elsewhere once the device takes them."""
    flag = tmp_path / "fail"
    library = failing_disk()
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-io", "pread", "--storage-segment", "4MiB")
    with Daemon(*arguments, environment={"LD_PRELOAD": library, "FAIL_SYNC": str(flag)}) as daemon:
        cache = Cache(daemon.stub(), "s", layers=LAYERS, durability=ASYNC, recent_window=16)
        fill(cache, 300)
        wait_for(lambda: list(cache.info().durable) == [256] * LAYERS, "nothing becomes durable")
        flag.touch()
        fill(cache, 300, position=300)
        wait_for(lambda: daemon.metric("qkvd_storage_failed_total") > 0, "no sync fails")
        assert list(cache.info().durable) == [256] * LAYERS
        synced = Cache(daemon.stub(), "synced", layers=LAYERS, durability=SYNC, recent_window=16)
        with refused(grpc.StatusCode.UNAVAILABLE, "not durable", "the disk failed"):
            fill(synced, 300)
        before = [rows(cache, 576, layer) for layer in range(LAYERS)]
        flag.unlink()
        wait_for(lambda: list(cache.info().durable) == [576] * LAYERS, "it does not become durable any more")
        wait_for(lambda: list(synced.info().durable)[0] == 300, "nor what was not acknowledged")
        daemon.kill()
    with Daemon(*arguments) as daemon:
        cache.stub = daemon.stub()
        assert list(cache.info().lengths) == [576] * LAYERS
        for layer in range(LAYERS):
            for first, second in zip(before[layer], rows(cache, 576, layer)):
                assert np.array_equal(first, second)


@pytest.mark.skipif(SANITIZED, reason="a library before libc and sanitizers do not go together")
def test_forks_on_a_failing_disk(tmp_path):
    """Forks made while syncs fail share pages that have no record. Each has all of its own once the device takes them,
    though their parent has been closed meanwhile, and after a crash."""
    flag = tmp_path / "fail"
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-io", "pread", "--storage-segment", "4MiB")
    with Daemon(*arguments, environment={"LD_PRELOAD": failing_disk(), "FAIL_SYNC": str(flag)}) as daemon:
        parent = Cache(daemon.stub(), "parent", layers=LAYERS, durability=ASYNC, recent_window=16)
        fill(parent, 300)
        wait_for(lambda: list(parent.info().durable) == [256] * LAYERS, "nothing becomes durable")
        flag.touch()
        fill(parent, 300, position=300)
        wait_for(lambda: daemon.metric("qkvd_storage_failed_total") > 0, "no sync fails")
        heirs = []
        for name, of, position in (("durable", parent, 256), ("within", parent, 420), ("whole", parent, 600),
                                   ("of a fork", None, 500)):
            heir = copy.copy(of or heirs[-1])
            heir.stub.Fork(kv.ForkRequest(session=heir.name, fork=name.replace(" ", "-"), position=position))
            heir.name = name.replace(" ", "-")
            fill(heir, 150, position=position)
            heirs.append(heir)
        heirs[2].stub.Truncate(kv.TruncateRequest(session="whole", position=550))
        parent.stub.CloseSession(kv.CloseSessionRequest(session="parent"))
        before = [[rows(heir, 0, layer) for layer in range(LAYERS)] for heir in heirs]
        assert max(heirs[1].info().durable) <= 256
        flag.unlink()

        def are_durable():
            infos = [heir.info() for heir in heirs]
            return all(durable > length - 16 - 64 for info in infos for durable, length in zip(info.durable, info.lengths))

        wait_for(are_durable, "forks do not become durable")
        daemon.kill()
    with Daemon(*arguments) as daemon:
        for heir, held in zip(heirs, before):
            heir.stub = daemon.stub()
            length = heir.info().lengths[0]
            assert 0 <= held[0][0].shape[0] - length < 16 + 64
            for layer in range(LAYERS):
                for first, second in zip(held[layer], rows(heir, 0, layer)):
                    assert np.array_equal(first[:length], second)
        assert daemon.metric("qkvd_storage_lost_pages_total") == 0
        for heir in heirs:
            heir.stub.CloseSession(kv.CloseSessionRequest(session=heir.name))
        storage = admin_pb2_grpc.AdminStub(daemon.channel())
        wait_for(lambda: storage.GetStorage(admin_pb2.GetStorageRequest()).records == 0, "records of forks stay")


@pytest.mark.skipif(SANITIZED, reason="a library before libc and sanitizers do not go together")
def test_what_the_journal_does_not_take_is_not_done(tmp_path):
    """Pin and Touch that are answered with an error have changed nothing."""
    flag = tmp_path / "fail"
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-io", "pread")
    with Daemon(*arguments, environment={"LD_PRELOAD": failing_disk(), "FAIL_JOURNAL": str(flag)}) as daemon:
        cache = Cache(daemon.stub(), "s", durability=ASYNC)
        cache.stub.Touch(kv.TouchRequest(session="s", ttl_ms=3600000))
        flag.touch()
        with refused(grpc.StatusCode.INTERNAL, "journal"):
            cache.stub.Pin(kv.PinRequest(session="s"))
        with refused(grpc.StatusCode.INTERNAL, "journal"):
            cache.stub.Touch(kv.TouchRequest(session="s", ttl_ms=1))
        info = cache.info()
        assert not info.pinned and info.ttl_ms == 3600000


@pytest.mark.skipif(SANITIZED, reason="a library before libc and sanitizers do not go together")
def test_pins_of_several_sessions_share_a_write(tmp_path):
    """Where the journal takes long, a pin waits for two writes to it at most, not for one for each pin before it."""
    flag = tmp_path / "slow"
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-io", "pread")
    with Daemon(*arguments, environment={"LD_PRELOAD": failing_disk(), "SLOW_JOURNAL": str(flag)}) as daemon:
        stub = daemon.stub()
        names = [Cache(Tenant(stub, f"of-{i % 2}"), f"s{i}", layers=1, durability=ASYNC).name for i in range(12)]
        flag.touch()

        def seconds(count):
            begin = time.monotonic()
            pins = [stub.Pin.future(kv.PinRequest(session=name), metadata=(("qkv-tenant", f"of-{i % 2}"),), timeout=TIMEOUT)
                    for i, name in enumerate(names[:count])]
            for pin in pins:
                pin.result()
            return time.monotonic() - begin

        # A write takes 0.25 s; a busy machine makes both longer.
        assert any(seconds(10) < 4 * seconds(1) for _ in range(5))
        flag.unlink()


@pytest.mark.skipif(SANITIZED, reason="a library before libc and sanitizers do not go together")
def test_an_append_waits_for_no_other_truncation(tmp_path):
    """The rows are on the disk before the truncation of another session is: the append is acknowledged."""
    segments, journal = tmp_path / "segments", tmp_path / "journal"
    held = {"LD_PRELOAD": failing_disk(), "HOLD_SYNC": str(segments), "HOLD_JOURNAL": str(journal)}
    with Daemon("--data-dir", str(tmp_path / "data"), "--storage-io", "pread", environment=held) as daemon:
        mine, other = (Cache(daemon.stub(), name, layers=1, durability=SYNC) for name in ("mine", "other"))
        other.append(0, *other.rows(100))
        admin = admin_pb2_grpc.AdminStub(daemon.channel())

        def written():
            return admin.GetStorage(admin_pb2.GetStorageRequest(), timeout=TIMEOUT).put_bytes

        before = written()
        segments.touch()
        append = mine.stub.Append.future(iter([kv.AppendRequest(items=[mine.item(0, *mine.rows(10))])]))
        wait_for(lambda: written() > before, "the append")
        journal.touch()
        truncation = other.stub.Truncate.future(kv.TruncateRequest(session="other", position=50))
        wait_for(lambda: list(other.info().lengths) == [50], "the truncation")
        segments.unlink()
        append.result(timeout=TIMEOUT)
        assert not truncation.done()
        journal.unlink()
        assert list(truncation.result(timeout=TIMEOUT).lengths) == [50]


@pytest.mark.skipif(SANITIZED, reason="a library before libc and sanitizers do not go together")
def test_a_snapshot_that_waits_for_a_thread_is_not_refused(tmp_path):
    """While puts of another tenant have all places of the queue, a snapshot's token ids wait, and count as no refusal."""
    flag = tmp_path / "hold"
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-io", "pread", "--limit-queue", "1")
    with Daemon(*arguments, environment={"LD_PRELOAD": failing_disk(), "HOLD_SYNC": str(flag)}) as daemon:
        cache = Cache(Tenant(daemon.stub(), "reader"), "s", layers=1)
        cache.append(0, *cache.rows(128), token_ids=range(128))
        put = objects_pb2_grpc.ObjectsStub(daemon.channel()).PutObjects
        flag.touch()
        waiting, refusals = [], 0

        def refused_one():
            nonlocal refusals
            begin = objects_pb2.ObjectInfo(object=f"o{len(waiting)}", bytes=1, durability=SYNC)
            piece = objects_pb2.PutPiece(begin=begin, data=b"x")
            waiting.append(put.future(iter([objects_pb2.PutObjectsRequest(pieces=[piece])]), timeout=TIMEOUT))
            time.sleep(0.01)
            refusals = sum(call.done() for call in waiting)
            return refusals > 0

        wait_for(refused_one, "the queue takes all puts")
        watch = cache.stub.Watch(kv.WatchRequest(token_ids=True), timeout=TIMEOUT)
        next(watch)  # the pages; their ids follow
        for _ in range(20):
            time.sleep(0.05)
            assert daemon.metric("qkvd_refused_queue_total") == sum(call.done() for call in waiting)
        flag.unlink()
        ids = None
        while ids is None:
            ids = next((list(event.token_ids) for event in next(watch).events if event.token_ids), None)
        assert ids == list(range(128))
        watch.cancel()


@pytest.mark.skipif(SANITIZED, reason="a library before libc and sanitizers do not go together")
def test_one_compaction_at_a_time(tmp_path):
    """While one Compact runs, others are refused at once instead of taking a thread each."""
    flag = tmp_path / "hold"
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-io", "pread", "--storage-segment", "1MiB",
                 "--storage-compact-rate", "0")
    with Daemon(*arguments, environment={"LD_PRELOAD": failing_disk(), "HOLD_SYNC": str(flag)}) as daemon:
        caches = [Cache(daemon.stub(), name, layers=LAYERS, durability=SYNC) for name in ("kept", "closed")]
        for position in range(0, 16000, 1000):
            for cache in caches:
                fill(cache, 1000, position)
        caches[1].stub.CloseSession(kv.CloseSessionRequest(session="closed"))
        admin = admin_pb2_grpc.AdminStub(daemon.channel())
        flag.touch()
        running = admin.Compact.future(admin_pb2.CompactRequest())
        for _ in range(10):  # more than the pool has threads
            time.sleep(0.05)
            with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "Compact", "1 at a time"):
                admin.Compact(admin_pb2.CompactRequest(), timeout=10)
        assert not running.done()
        flag.unlink()
        assert running.result(timeout=60).bytes_freed > 0
        admin.Compact(admin_pb2.CompactRequest(), timeout=60)


def expect_an_end(daemon, waiting):
    """Calls that wait end soon after they are cancelled."""
    time.sleep(0.5)
    assert not any(call.done() for call in waiting)
    for call in waiting:
        call.cancel()
    began = time.monotonic()
    wait_for(lambda: daemon.metric("qkvd_calls_running") <= 1, "calls go on")  # this one
    assert time.monotonic() - began < 3


@pytest.mark.skipif(SANITIZED, reason="a library before libc and sanitizers do not go together")
def test_clients_that_go_do_not_wait_for_memory(tmp_path):
    """Memory is full of pages that do not become durable: calls that wait for some end soon after they are cancelled."""
    flag = tmp_path / "hold"
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-io", "pread", "--memory-budget", "4MiB",
                 "--memory-high", "1", "--memory-low", "1", "--ema-every", "0", "--calibrate-tokens", "0")
    with Daemon(*arguments, environment={"LD_PRELOAD": failing_disk(), "HOLD_SYNC": str(flag)}) as daemon:
        cache = Cache(daemon.stub(), "s", layers=1, recent_window=0, durability=ASYNC)
        flag.touch()
        position, k, v = 0, *cache.rows(2000)

        def append():
            request = kv.AppendRequest(items=[cache.item(position, k, v)])
            return cache.stub.Append.future(iter([request]))

        call = append()
        while True:
            try:
                call.result(timeout=1)
            except grpc.FutureTimeoutError:
                break
            position += len(k)
            call = append()
        waiting = [call] + [append() for _ in range(3)]  # the first one has its turn, others wait for theirs
        expect_an_end(daemon, waiting)
        flag.unlink()
        append().result(timeout=60)


@pytest.mark.skipif(SANITIZED, reason="a library before libc and sanitizers do not go together")
@pytest.mark.parametrize("limit", ["memory-budget", "quota"])
def test_items_of_a_call_wait_for_memory_together(tmp_path, limit):
    """Memory is full of pages that do not become durable. The first item of a call waits for some for 10 s, and the others all
    together for less than that; each says what it was refused for."""
    flag, quotas = tmp_path / "hold", tmp_path / "quotas"
    quotas.write_text("" if limit == "memory-budget" else "default host_bytes=4MiB\n")
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-io", "pread", "--memory-high", "1", "--memory-low", "1",
                 "--memory-budget", "4MiB" if limit == "memory-budget" else "1GiB", "--ema-every", "0",
                 "--calibrate-tokens", "0", "--quota-file", str(quotas))
    with Daemon(*arguments, environment={"LD_PRELOAD": failing_disk(), "HOLD_SYNC": str(flag)}) as daemon:
        cache = Cache(daemon.stub(), "s", layers=4, recent_window=0, durability=ASYNC)
        flag.touch()
        position, rows = 0, cache.rows(2000)

        def attend(layers):
            items = [cache.item(position if layer == 0 else 0, *rows, layer=layer) for layer in layers]
            return cache.stub.Attend.future(kv.AttendRequest(items=items), timeout=TIMEOUT)

        while True:
            call = attend([0])
            try:
                call.result(timeout=1)
            except grpc.FutureTimeoutError:
                break
            position += 2000
        call.cancel()
        began = time.monotonic()
        assert attend(range(4)).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 9 < time.monotonic() - began < 30
        flag.unlink()
        assert [result.status.code for result in attend(range(4)).result().results] == [0] * 4


def calls_that_wait_for_the_disk(cache):
    """By the file that holds the disk up."""
    return {"Truncate": ("journal", kv.TruncateRequest(session=cache.name, position=50)),
            "Demote": ("segments", kv.DemoteRequest(session=cache.name, bits=1)),
            "CloseSession": ("segments", kv.CloseSessionRequest(session=cache.name, keep=True))}


@pytest.mark.skipif(SANITIZED, reason="a library before libc and sanitizers do not go together")
@pytest.mark.parametrize("method", ["Truncate", "Demote", "CloseSession"])
def test_clients_that_go_do_not_wait_for_the_disk(tmp_path, method):
    """What a call has done does not become durable: it ends soon after it is cancelled, and its thread is free."""
    files = {"segments": tmp_path / "segments", "journal": tmp_path / "journal"}
    held = {"LD_PRELOAD": failing_disk(), "HOLD_SYNC": str(files["segments"]), "HOLD_JOURNAL": str(files["journal"])}
    with Daemon("--data-dir", str(tmp_path / "data"), "--storage-io", "pread", environment=held) as daemon:
        cache = Cache(daemon.stub(), "s", layers=1, recent_window=0, durability=ASYNC)
        file, request = calls_that_wait_for_the_disk(cache)[method]
        files[file].touch()
        cache.append(0, *cache.rows(1024))
        waiting = [getattr(cache.stub, method).future(request) for _ in range(3)]
        expect_an_end(daemon, waiting)
        files[file].unlink()
        assert list(cache.info().lengths) == [50 if method == "Truncate" else 1024]
        getattr(cache.stub, method)(request, timeout=TIMEOUT)


# ---- A start that cannot read ----

def storage(daemon, *more):
    run = subprocess.run([binary("qkvctl"), "storage", "--target", daemon.target, *more], check=True, text=True,
                         stdout=subprocess.PIPE, env=clean_environment())
    return run.stdout


@pytest.mark.skipif(SANITIZED, reason="a library before libc and sanitizers do not go together")
def test_what_a_start_cannot_read_is_there_for_the_next(tmp_path):
    """Sessions end earlier for such a start. One that is appended to or truncated then ends there for ever."""
    flag = tmp_path / "fail"
    library = failing_disk()
    arguments = ("--data-dir", str(tmp_path / "data"), "--storage-io", "pread", "--storage-segment", "4MiB")
    names = ("left", "appended", "truncated")
    with Daemon(*arguments) as daemon:
        caches = {name: Cache(daemon.stub(), name, layers=LAYERS, durability=SYNC, recent_window=16)
                  for name in names}
        for cache in caches.values():
            fill(cache, 300)
        before = [rows(caches["left"], 300, layer) for layer in range(LAYERS)]
        daemon.kill()
    flag.touch()
    with Daemon(*arguments, environment={"LD_PRELOAD": library, "FAIL_READ": str(flag)}) as daemon:
        unread = daemon.metric("qkvd_storage_unread_segments")
        assert unread >= 1
        shown = json.loads(storage(daemon, "--json"))
        assert shown["unread_segments"] == unread == sum(segment["unread"] for segment in shown["segments"])
        text = storage(daemon)
        assert f"{int(unread)} segments that the start could not read" in text
        assert sum(line.split()[-1] == "unread" for line in text.splitlines()) == unread
        assert messages(daemon, "a segment cannot be read, it stays for the next start")
        for cache in caches.values():
            cache.stub = daemon.stub()
            assert list(cache.info().lengths) == [0] * LAYERS
        flag.unlink()
        new = caches["appended"].rows(8)
        caches["appended"].append(0, *new, layer=1)
        response = daemon.stub().Truncate(kv.TruncateRequest(session="truncated", position=100))
        assert list(response.lengths) == [0] * LAYERS
        daemon.kill()
    with Daemon(*arguments) as daemon:
        assert daemon.metric("qkvd_storage_unread_segments") == 0
        shown = json.loads(storage(daemon, "--json"))
        assert shown["unread_segments"] == 0 and not any(segment["unread"] for segment in shown["segments"])
        for cache in caches.values():
            cache.stub = daemon.stub()
        assert list(caches["left"].info().lengths) == [300] * LAYERS
        for layer in range(LAYERS):
            for first, second in zip(before[layer], rows(caches["left"], 300, layer)):
                assert np.array_equal(first, second)
        assert list(caches["truncated"].info().lengths) == [0] * LAYERS
        assert list(caches["appended"].info().lengths) == [0, 8]
        for first, second in zip(new, rows(caches["appended"], 8, 1)):
            assert np.array_equal(first, second)


# ---- A full file system ----

@pytest.fixture
def small_disk(tmp_path):
    """An ext4 of 64 MiB in a file; in memory, where that can be, as a busy disk takes minutes over it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as image:
        image.truncate(64 << 20)
        made = subprocess.run(f"mkfs.ext4 -q -m 0 {image.name} && mount -o loop {image.name} {folder}", shell=True,
                              capture_output=True, text=True)
        if made.returncode != 0:
            pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
        yield folder
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("io", ["uring", "pread"])
def test_a_full_file_system(small_disk, io):
    """Where storage-budget is more than the disk has, nothing is deleted, and everything is served; with free space again
    everything becomes durable."""
    arguments = ("--data-dir", str(small_disk / "data"), "--storage-io", io, "--storage-segment", "4MiB",
                 "--storage-budget", "1GiB", "--calibrate-tokens", "0", "--ema-every", "0",
                 "--admin-listen", f"unix:{small_disk.parent}/admin")
    with Daemon(*arguments) as daemon:
        first = Cache(daemon.stub(), "first", layers=LAYERS, durability=ASYNC, recent_window=16)
        large = Cache(daemon.stub(), "large", layers=LAYERS, durability=ASYNC, recent_window=16, bits_k=8, bits_v=8)
        synced = Cache(daemon.stub(), "synced", layers=LAYERS, durability=SYNC, recent_window=16)
        fill(first, 300)
        position = 0
        while daemon.metric("qkvd_storage_degraded") == 0:
            assert position < 4_000_000, "the disk is never full"
            fill(large, 4000, position)
            position += 4000
        fill(first, 4000, 300)
        time.sleep(1.5)  # sessions in use are not deleted
        for path, answer in (("live", "live"), ("ready", "ready, but the SSD refuses what is written")):
            said = subprocess.run(["curl", "-sS", "--fail", "--unix-socket", f"{small_disk.parent}/admin",
                                   f"http://localhost/health/{path}"], capture_output=True, text=True)
            assert said.returncode == 0 and said.stdout.startswith(answer), said
        assert rows(first, 4224)[0].shape == (4224, 2, 16)
        assert daemon.metric("qkvd_storage_expelled_sessions_total") == 0
        before = [rows(first, 4224, layer) for layer in range(LAYERS)]
        assert rows(large, 4000)[0].shape == (4000, 2, 16)
        with refused(grpc.StatusCode.UNAVAILABLE):
            fill(synced, 300)
        large.stub.CloseSession(kv.CloseSessionRequest(session="large"))
        wait_for(lambda: min(first.info().durable) >= 4224, "it does not become durable")
        wait_for(lambda: daemon.metric("qkvd_storage_degraded") == 0, "the disk has room again")
        daemon.kill()
    with Daemon(*arguments) as daemon:
        first.stub = daemon.stub()
        for layer in range(LAYERS):
            for a, b in zip(before[layer], rows(first, 4224, layer)):
                assert np.array_equal(a, b)
        with refused(grpc.StatusCode.NOT_FOUND, "large"):
            large.stub = daemon.stub()
            large.info()


def test_a_budget_from_the_file_system(small_disk):
    """Without storage-budget the disk does not become full: the longest unused sessions are deleted before."""
    def limit(daemon):
        return daemon.metric("qkvd_storage_budget_bytes")

    arguments = ("--data-dir", str(small_disk / "data"), "--storage-segment", "4MiB", "--calibrate-tokens", "0",
                 "--ema-every", "0")
    with Daemon(*arguments) as daemon:
        budget, space = limit(daemon), os.statvfs(small_disk)
        assert 0.85 * space.f_bavail * space.f_frsize < budget < 0.95 * (64 << 20)
        for number in range(20):
            cache = Cache(daemon.stub(), f"session-{number}", layers=LAYERS, durability=ASYNC, recent_window=16,
                          bits_k=8, bits_v=8)
            for position in range(0, 64000, 4000):
                fill(cache, 4000, position)
            wait_for(lambda: min(cache.info().durable) >= 63000, "it does not become durable")
            assert daemon.metric("qkvd_storage_degraded") == 0
            assert os.statvfs(small_disk).f_bavail > 0
            if daemon.metric("qkvd_storage_expelled_sessions_total") > 0:
                break
            time.sleep(1.1)  # sessions in use are not deleted
        assert number > 1 and daemon.metric("qkvd_storage_expelled_sessions_total") > 0
        daemon.kill()
    with Daemon(*arguments) as daemon:  # what is there counts in what may be taken
        assert abs(limit(daemon) - budget) < budget / 20
        cache.stub = daemon.stub()
        assert min(cache.info().lengths) > 63000
    with Daemon(*arguments, "--storage-budget", "16MiB") as daemon:
        assert limit(daemon) == 16 << 20
