"""Quotas of tenants: by file, RPC and qkvctl, to the byte, and after kill -9."""

import json
import subprocess
import threading
import time

import grpc
import numpy as np
import pytest

from daemon import PATIENCE, Daemon, binary, wait_for
from kv import TIMEOUT, Cache, Tenant, refused
from qkv.v1 import admin_pb2, admin_pb2_grpc
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2, objects_pb2, objects_pb2_grpc
from test_http import ADMIN, attend_runs

MIB = 1 << 20


class Admin:
    def __init__(self, daemon):
        self.stub = admin_pb2_grpc.AdminStub(daemon.channel())

    def set(self, tenant, **fields):
        quota = admin_pb2.Quota(tenant=tenant, **fields)
        self.stub.SetQuota(admin_pb2.SetQuotaRequest(quota=quota), timeout=TIMEOUT)

    def get(self, tenant=""):
        return self.stub.GetQuota(admin_pb2.GetQuotaRequest(tenant=tenant), timeout=TIMEOUT).tenants

    def usage(self, tenant):
        return self.get(tenant)[0].usage


def ctl(daemon, *arguments):
    command = [binary("qkvctl"), *arguments, "--target", f"unix:{daemon.socket}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def open_more(stub, cache, name):
    return stub.OpenSession(kv.OpenSessionRequest(session=name, model=cache.model.name), timeout=TIMEOUT)


def put_object(stub, name, value, **fields):
    begin = objects_pb2.ObjectInfo(object=name, bytes=len(value), **fields)
    stub.PutObjects(iter([objects_pb2.PutObjectsRequest(pieces=[objects_pb2.PutPiece(begin=begin, replace=True, data=value)])]),
                    timeout=TIMEOUT)


@pytest.fixture
def quotas(tmp_path):
    path = tmp_path / "quotas"
    path.write_text("# of the team\n* sessions=3\n")
    return path


# ---- Where they come from ----


def test_a_file_is_read_and_written(quotas):
    with Daemon("--quota-file", str(quotas)) as daemon:
        admin = Admin(daemon)
        got = admin.get("a")[0]
        assert (got.quota.sessions, got.by_default, got.quota.tenant) == (3, True, "a")
        admin.set("a", sessions=5, host_bytes=7 * MIB)
        assert quotas.read_text() == "# of the team\n* sessions=3\na host_bytes=7340032 sessions=5\n"
        quotas.write_text("# changed\na sessions=1   \n* weight=5\nb calls=2")
        wait_for(lambda: admin.get("a")[0].quota.sessions == 1, "the file is not read anew")
        admin.set("c", bytes_per_second=9)
        admin.set("a")
        assert quotas.read_text() == "# changed\n* weight=5\nb calls=2\nc bytes_per_second=9\n"
        quotas.write_text("a sessions=x\n")
        wait_for(lambda: "a whole number is needed" in daemon.log_text(), "the log does not name the mistake")
        assert admin.get("c")[0].quota.bytes_per_second == 9  # what was known stays


def test_all_tenants_by_pages(tmp_path):
    """Those with a quota, with sessions, and with calls alone: each once, in the order of names."""
    path = tmp_path / "quotas"
    path.write_text("* sessions=9\n" + "".join(f"t{i:04} sessions=3\n" for i in range(0, 2400, 2)))
    with Daemon("--quota-file", str(path)) as daemon:
        admin, model = Admin(daemon), Cache(daemon.stub(), "first").model
        for i in range(0, 30, 3):
            stub = Tenant(daemon.stub(), f"t{i:04}")
            stub.RegisterModel(model_pb2.RegisterModelRequest(model=model), timeout=TIMEOUT)
            stub.OpenSession(kv.OpenSessionRequest(session="s", model=model.name), timeout=TIMEOUT)
            Tenant(daemon.stub(), f"u{i}").ListModels(model_pb2.ListModelsRequest(), timeout=TIMEOUT)
        known = admin.get()
        names = [tenant.quota.tenant for tenant in known]
        assert names == sorted(set(names)) and len(names) == 1 + 1200 + 5 + 10
        assert admin.stub.GetQuota(admin_pb2.GetQuotaRequest(), timeout=TIMEOUT).next_page_token == ""
        for size in 1, 7, 500, 1000:
            token, got, pages = "", [], 0
            while pages == 0 or (token and pages < 10):
                request = admin_pb2.GetQuotaRequest(page_size=size, page_token=token)
                answer = admin.stub.GetQuota(request, timeout=TIMEOUT)
                assert len(answer.tenants) == size or answer.next_page_token == ""
                token, pages = answer.next_page_token, pages + 1
                got += answer.tenants
            assert [tenant.quota for tenant in got] == [tenant.quota for tenant in known[:size * 10]]
            assert [tenant.usage.sessions for tenant in got] == [tenant.usage.sessions for tenant in known[:size * 10]]
            assert (token == "") == (size * 10 >= len(names))
        assert not admin.stub.GetQuota(admin_pb2.GetQuotaRequest(page_token="zz"), timeout=TIMEOUT).tenants
        for fields in {"page_size": 1001}, {"page_token": "no name"}:
            with refused(grpc.StatusCode.INVALID_ARGUMENT, next(iter(fields))):
                admin.stub.GetQuota(admin_pb2.GetQuotaRequest(**fields), timeout=TIMEOUT)
        lines = [json.loads(line)["tenant"] for line in ctl(daemon, "quota", "--json").stdout.splitlines()]
        assert lines == names
        assert len(ctl(daemon, "quota").stdout.splitlines()) == 1 + len(names)


@pytest.mark.parametrize("text, reason", [
    ("a sessions=-1", "sessions is -1"), ("a b=1", "unknown field b"), ("a sessions", "must be FIELD=VALUE"),
    ("a sessions=1 sessions=2", "sessions is given twice"),
    ("a sessions=1\na calls=1", "two lines are about the tenant a"),
    ("no/na|me sessions=1", "tenant has byte"), ("* host_bytes_guaranteed=1", "nothing can be guaranteed to all"),
    ("a host_bytes=1 host_bytes_guaranteed=2", "host_bytes_guaranteed is 2, at most host_bytes, which is 1"),
    ("a host_bytes_guaranteed=40MiB\nb host_bytes_guaranteed=40MiB",
     "of all tenants is 83886080, memory-budget is 67108864"),
])
def test_a_wrong_file_is_refused_at_start(quotas, text, reason):
    quotas.write_text(text)
    command = [binary("qkvd"), "--listen", "127.0.0.1:0", "--memory-budget", "64MiB", "--quota-file", str(quotas)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert reason in done.stderr


def test_without_a_place_nothing_is_set(daemon):
    with refused(grpc.StatusCode.FAILED_PRECONDITION, "neither a quota-file nor a data-dir"):
        Admin(daemon).set("a", sessions=1)


def test_what_was_answered_survives_a_crash(tmp_path):
    data = ("--data-dir", str(tmp_path / "data"), "--durability", "sync", "--calibrate-tokens", "0")
    with Daemon(*data) as daemon:
        Admin(daemon).set("a", sessions=2, host_bytes=MIB, weight=7)
        cache = Cache(Tenant(daemon.stub(), "a"), "one")
        cache.append(0, *cache.rows(128))
        open_more(cache.stub, cache, "two")
        daemon.kill()
    with Daemon(*data) as daemon:
        admin = Admin(daemon)
        got = admin.get("a")[0]
        assert (got.quota.sessions, got.quota.host_bytes, got.quota.weight, got.by_default) == (2, MIB, 7, False)
        assert got.usage.sessions == 2 and got.usage.ssd_bytes > 0
        stub = Tenant(daemon.stub(), "a")
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "quota sessions of tenant a is 2, 2 are open"):
            open_more(stub, cache, "three")
        stub.CloseSession(kv.CloseSessionRequest(session="one"), timeout=TIMEOUT)
        wait_for(lambda: admin.usage("a").ssd_bytes == 0, "bytes of a closed session are counted")
        open_more(stub, cache, "three")


def test_qkvctl(quotas):
    with Daemon("--quota-file", str(quotas)) as daemon:
        done = ctl(daemon, "quota", "set", "a", "host_bytes=1GiB", "calls=4")
        assert done.returncode == 0, done.stderr
        done = ctl(daemon, "quota", "set", "a", "calls=8")  # the other one stays
        assert done.returncode == 0, done.stderr
        row = json.loads(ctl(daemon, "quota", "show", "a", "--json").stdout)
        assert (row["quota"]["host_bytes"], row["quota"]["calls"], row["by_default"]) == (1 << 30, 8, False)
        assert "of 1.0 GiB" in ctl(daemon, "quota").stdout
        assert ctl(daemon, "quota", "rm", "a").returncode == 0
        row = json.loads(ctl(daemon, "quota", "show", "a", "--json").stdout)
        assert row["by_default"] and row["quota"]["sessions"] == 3
        for arguments, text in ((("set", "a"), "set TENANT FIELD=VALUE"), (("set", "a", "x=1"), "unknown field"),
                                (("set", "a", "calls=x"), "a whole number is needed")):
            done = ctl(daemon, "quota", *arguments)
            assert done.returncode != 0 and text in done.stderr


# ---- What they hold ----


def test_sessions_models_and_calls(quotas):
    with Daemon("--quota-file", str(quotas)) as daemon:
        admin = Admin(daemon)
        stub = Tenant(daemon.stub(), "a")
        cache = Cache(stub, "one")
        for name in ("two", "three"):
            open_more(stub, cache, name)
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "quota sessions of tenant a is 3, 3 are open"):
            open_more(stub, cache, "four")
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "quota sessions of tenant a is 3"):
            stub.Fork(kv.ForkRequest(session="one", fork="five"), timeout=TIMEOUT)
        Cache(Tenant(daemon.stub(), "b"), "one")  # another one's
        admin.set("a", models=2, calls=2)
        open_more(stub, cache, "four")  # its own quota takes the place of that of "*"
        Cache(stub, "five")
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "quota models of tenant a is 2, it has registered 2"):
            Cache(stub, "six")
        streams, never = [], threading.Event()

        def requests():
            yield kv.AttendRequest(items=[cache.item(0, q=cache.queries(1))])
            never.wait(TIMEOUT)

        for _ in range(2):
            streams.append(stub.Decode(requests(), timeout=TIMEOUT))
            next(streams[-1])
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "quota calls of tenant a is 2, 2 are running"):
            cache.info()
        assert admin.usage("a").calls == 2
        assert admin.usage("a").refused >= 1
        never.set()


def test_models_count_once(quotas):
    """However many register one at once, and whether what follows is refused or not."""
    with Daemon("--quota-file", str(quotas)) as daemon:
        admin = Admin(daemon)
        admin.set("a", models=2)
        model = Cache(Tenant(daemon.stub(), "b"), "shape").model
        begin = threading.Barrier(8)

        def register(name, **fields):
            message = model_pb2.Model(**{**{f.name: v for f, v in model.ListFields()}, "name": name, **fields})
            Tenant(daemon.stub(), "a").RegisterModel(model_pb2.RegisterModelRequest(model=message), timeout=TIMEOUT)

        def together():
            begin.wait()
            register("same")

        threads = [threading.Thread(target=together) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert admin.usage("a").models == 1
        with refused(grpc.StatusCode.DATA_LOSS):
            register("wrong", calibration=b"x")
        register("second")
        assert admin.usage("a").models == 2
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "quota models of tenant a is 2, it has registered 2"):
            register("third")


def test_a_file_with_a_mistake_is_not_written(quotas):
    with Daemon("--quota-file", str(quotas)) as daemon:
        text = "a sessions=x\n"
        quotas.write_text(text)
        wait_for(lambda: "a whole number is needed" in daemon.log_text(), "the log does not name the mistake")
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "a whole number is needed"):
            Admin(daemon).set("b", sessions=1)
        assert quotas.read_text() == text


def test_what_cannot_be_appended_takes_nobodys_memory(quotas):
    """A layer, a shape or a position that is wrong, where memory or the tenant's quota is full."""
    shape = {"layers": 1, "kv_heads": 2, "key_dim": 64, "value_dim": 64}
    for name, budget, line in ("memory", "8MiB", "* calls=60"), ("quota", "64MiB", f"a host_bytes={MIB}"):
        quotas.write_text(line + "\n")
        with Daemon("--quota-file", str(quotas), "--calibrate-tokens", "0", "--memory-budget", budget) as daemon:
            other = Cache(Tenant(daemon.stub(), "b"), "other", **shape)
            names = [f"chunk-{i}" for i in range(5)]
            for chunk in names:
                other.stub.OpenSession(kv.OpenSessionRequest(session=chunk, model=other.model.name,
                                                             retention=kv.RETENTION_EVICT), timeout=TIMEOUT)
                other.name = chunk
                other.append(0, *other.rows(64))
            cache = Cache(Tenant(daemon.stub(), "a"), "full", **shape)
            open_more(cache.stub, cache, "new")
            position = 0
            for count in 256, 16, 1:
                with pytest.raises(grpc.RpcError) as full:
                    while True:
                        cache.append(position, *cache.rows(count))
                        position += count
                assert full.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            with pytest.raises(grpc.RpcError):
                for i in range(10_000):
                    open_more(cache.stub, cache, f"filler-{i}")
            present = [p != 0 for p in other.stub.HasSessions(kv.HasSessionsRequest(sessions=names), timeout=TIMEOUT).presence]
            assert any(present) == (name == "quota"), "memory is full of sessions that stay, or the quota is"
            rows = [np.zeros((64, 2, 64), np.float32)] * 2
            for session, end in ("full", position), ("new", 0):
                cache.name = session
                wrong = [(grpc.StatusCode.INVALID_ARGUMENT, {"layer": 900, "position": end})]
                wrong += [(grpc.StatusCode.FAILED_PRECONDITION, {"position": end + gap}) for gap in range(20_000, 600_000, 5_000)]
                for code, fields in wrong:
                    item = cache.item(fields.pop("position"), *rows, token_ids=range(64), **fields)
                    with refused(code):
                        cache.stub.Append(iter([kv.AppendRequest(items=[item])]), timeout=TIMEOUT)
                    with refused(code):
                        cache.stub.Attend(kv.AttendRequest(items=[item]), timeout=TIMEOUT)
            after = [p != 0 for p in other.stub.HasSessions(kv.HasSessionsRequest(sessions=names), timeout=TIMEOUT).presence]
            assert after == present
            assert daemon.alive()


def test_rates_hold_calls_back(quotas):
    with Daemon("--quota-file", str(quotas)) as daemon:
        admin = Admin(daemon)
        cache = Cache(Tenant(daemon.stub(), "a"), "one")
        other = Cache(Tenant(daemon.stub(), "b"), "one")
        rows = cache.rows(100)
        admin.set("a", rows_per_second=200)
        used = admin.usage("a").rows
        began = time.monotonic()

        def requests():
            for i in range(10):
                yield kv.AppendRequest(items=[cache.item(100 * i, *rows)])

        cache.stub.Append(requests(), timeout=TIMEOUT)  # a stream waits: 1000 rows, of which 200 are at once
        took = time.monotonic() - began
        assert took > 2.5, took
        assert admin.usage("a").rows - used == 1000
        began = time.monotonic()
        other.info()
        assert time.monotonic() - began < 2
        cache.append(1000, *cache.rows(2000))
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "quota rows_per_second of tenant a is 200, it has used"):
            cache.info()
        assert admin.usage("a").refused >= 1
        admin.set("a", bytes_per_second=1000)
        cache.append(3000, *cache.rows(100))
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "quota bytes_per_second of tenant a is 1000, it has used"):
            cache.info()


def fill(cache, stop, failures):
    """Appends until it is refused, by which quota is noted."""
    position, rows = 0, cache.rows(64)
    while not stop.is_set():
        try:
            cache.append(position, *rows)
            position += 64
        except grpc.RpcError as error:
            failures.append(error)
            return


@pytest.mark.parametrize("data_dir", [False, True])
def test_memory_to_the_byte(tmp_path, data_dir):
    """Four clients of one tenant at once: never more than its ceiling, whenever one looks."""
    where = ("--data-dir", str(tmp_path / "data")) if data_dir else ()
    quotas = tmp_path / "quotas"
    quotas.write_text("a host_bytes=2MiB\n")
    with Daemon("--quota-file", str(quotas), *where) as daemon:
        admin = Admin(daemon)
        stop, failures = threading.Event(), []
        caches = [Cache(Tenant(daemon.stub(), "a"), f"s{i}", layers=1, seed=i, durability=kv.DURABILITY_MEMORY)
                  for i in range(4)]
        threads = [threading.Thread(target=fill, args=(cache, stop, failures)) for cache in caches]
        for thread in threads:
            thread.start()
        most = 0
        while any(thread.is_alive() for thread in threads):
            usage = admin.usage("a")
            assert usage.host_bytes <= 2 * MIB
            most = max(most, usage.host_bytes)
        for thread in threads:
            thread.join()
        assert most > 1.5 * MIB
        assert len(failures) == 4
        for failure in failures:
            assert failure.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "quota host_bytes of tenant a is 2097152 bytes" in failure.details(), failure.details()
        other = Cache(Tenant(daemon.stub(), "b"), "other")
        other.append(0, *other.rows(1000))
        for cache in caches:
            cache.stub.CloseSession(kv.CloseSessionRequest(session=cache.name), timeout=TIMEOUT)
        wait_for(lambda: admin.usage("a").host_bytes == 0, "memory of closed sessions is counted")


def test_a_tenant_at_its_ceiling_uses_the_ssd(tmp_path):
    """Its own longest unused rows leave memory, those of others stay; and come back when they are asked for."""
    quotas = tmp_path / "quotas"
    quotas.write_text("a host_bytes=1MiB\n")
    with Daemon("--quota-file", str(quotas), "--data-dir", str(tmp_path / "data"), "--calibrate-tokens", "0") as daemon:
        admin = Admin(daemon)
        other = Cache(Tenant(daemon.stub(), "b"), "other", layers=1, recent_window=0)
        other.append(0, *other.rows(4096))
        before = admin.usage("b").host_bytes
        caches = []
        for i in range(10):
            cache = Cache(Tenant(daemon.stub(), "a"), f"s{i}", layers=1, seed=i, recent_window=0)
            for position in range(0, 4096, 512):
                cache.append(position, *cache.rows(512))
                assert admin.usage("a").host_bytes <= MIB
            caches.append(cache)
        assert admin.usage("a").ssd_bytes > MIB
        for cache in caches:
            assert cache.fetch()[0].shape[0] == 4096
            assert admin.usage("a").host_bytes <= MIB
        assert admin.usage("b").host_bytes == before


def test_no_more_rows_are_coded_than_memory_is_needed(tmp_path):
    """At its ceiling a tenant has exact rows of idle sessions alone: those of the longest unused make way, not all."""
    quotas = tmp_path / "quotas"
    quotas.write_text("* sessions=20\n")
    with Daemon("--quota-file", str(quotas), "--data-dir", str(tmp_path / "data"), "--calibrate-tokens", "0") as daemon:
        admin, stub = Admin(daemon), Tenant(daemon.stub(), "a")
        shape = {"layers": 1, "kv_heads": 2, "q_heads": 2, "key_dim": 64, "value_dim": 64, "recent_window": 4096}
        caches = [Cache(stub, f"s{i}", seed=i, **shape) for i in range(9)]
        for cache in caches[:8]:
            cache.append(0, *cache.rows(1024))
        wait_for(lambda: time.time() * 1000 - caches[7].info().last_used_unix_ms > 500, "the sessions to be idle")
        admin.set("a", host_bytes=admin.usage("a").host_bytes + 4096)
        caches[8].append(0, *caches[8].rows(256))
        assert [cache.info().tokens_exact for cache in caches[4:]] == [1024] * 4 + [256]
        assert caches[0].info().tokens_exact == 0


def test_a_tenant_at_its_ceiling_on_the_ssd_loses_its_oldest(tmp_path):
    quotas = tmp_path / "quotas"
    quotas.write_text("a ssd_bytes=1MiB\n")
    with Daemon("--quota-file", str(quotas), "--data-dir", str(tmp_path / "data"), "--calibrate-tokens", "0") as daemon:
        admin = Admin(daemon)
        other = Cache(Tenant(daemon.stub(), "b"), "other", layers=1, recent_window=0)
        other.append(0, *other.rows(4096))
        stub = Tenant(daemon.stub(), "a")
        for i in range(8):
            cache = Cache(stub, f"s{i}", layers=1, seed=i, recent_window=0)
            cache.append(0, *cache.rows(4096))
            assert admin.usage("a").ssd_bytes <= MIB
            time.sleep(0.3)
        wait_for(lambda: "quota ssd_bytes is full, a session was deleted" in daemon.log_text(), "nothing was deleted")
        assert admin.usage("a").ssd_bytes <= MIB
        with refused(grpc.StatusCode.NOT_FOUND, "no session s0"):
            stub.GetSession(kv.GetSessionRequest(session="s0"), timeout=TIMEOUT)
        assert other.info().lengths[0] == 4096


@pytest.mark.parametrize("tokens", [64, 1024], ids=["small", "bulk"])
def test_a_tenant_whose_appends_wait_leaves_threads(tmp_path, tokens):
    """More appends of a tenant wait for its quota of the SSD than there are threads: another tenant opens, reads what is cold
    and appends before the first of them ends, after 5 seconds."""
    quotas = tmp_path / "quotas"
    quotas.write_text(f"a ssd_bytes=1\nb host_bytes={MIB // 2}\n")
    with Daemon("--quota-file", str(quotas), "--data-dir", str(tmp_path / "data"), "--calibrate-tokens", "0") as daemon:
        shape = {"layers": 1, "kv_heads": 1, "q_heads": 1, "recent_window": 0}
        other = Cache(Tenant(daemon.stub(), "b"), "sync", durability=kv.DURABILITY_SYNC, **shape)
        for i in range(8):
            cold = Cache(other.stub, f"s{i}", seed=i, **shape)
            cold.append(0, *cold.rows(4096))
        cold.name = "s0"
        assert cold.info().tokens_cold > 0
        stub, calls = Tenant(daemon.stub(), "a"), []
        caches = [Cache(stub, f"s{i}", durability=kv.DURABILITY_SYNC, **shape) for i in range(24)]
        for cache in caches:  # a session that is pinned is not deleted for the others
            stub.Pin(kv.PinRequest(session=cache.name), timeout=TIMEOUT)
        appends = daemon.stub().Append
        for cache in caches:
            request = kv.AppendRequest(items=[cache.item(0, *cache.rows(tokens))])
            calls.append(appends.future(iter([request]), timeout=TIMEOUT, metadata=(("qkv-tenant", "a"),)))
        wait_for(lambda: daemon.metric("qkvd_queue_jobs") >= len(calls) - 16, "the appends do not wait")
        open_more(other.stub, other, "new")
        assert cold.fetch()[0].shape[0] == 4096
        other.append(0, *other.rows(tokens))
        assert not any(call.done() for call in calls)
        Admin(daemon).set("a", ssd_bytes=64 * MIB)
        for call in calls:
            call.result()


def test_items_of_a_call_wait_for_the_ssd_together(tmp_path):
    """A call's sessions are not durable, as their tenant's quota of the SSD is full: it waits for all of them as long as for one,
    5 seconds."""
    quotas = tmp_path / "quotas"
    quotas.write_text("a ssd_bytes=1\n")
    with Daemon("--quota-file", str(quotas), "--data-dir", str(tmp_path / "data"), "--calibrate-tokens", "0") as daemon:
        stub, request = Tenant(daemon.stub(), "a"), kv.AttendRequest()
        for i in range(4):
            cache = Cache(stub, f"s{i}", layers=1, recent_window=0, durability=kv.DURABILITY_SYNC)
            stub.Pin(kv.PinRequest(session=cache.name), timeout=TIMEOUT)
            request.items.append(cache.item(0, *cache.rows(64)))
        began = time.monotonic()
        with refused(grpc.StatusCode.UNAVAILABLE, "held, but not durable", "quota ssd_bytes"):
            stub.Attend(request, timeout=TIMEOUT)
        assert 4 < time.monotonic() - began < 10
        Admin(daemon).set("a", ssd_bytes=64 * MIB)


@pytest.mark.parametrize("tokens", [64, 1024], ids=["small", "bulk"])
def test_a_tenant_that_evicts_leaves_threads(tmp_path, tokens):
    """In memory, appends of a tenant at its quota close sessions that an attend of its still reads, and wait for their memory:
    the jobs that compute do not, of which there are no more than processors."""
    quotas = tmp_path / "quotas"
    quotas.write_text("b host_bytes=64MiB\n")
    with Daemon("--quota-file", str(quotas), "--threads", "2", "--codec", "exact", *ADMIN) as daemon:
        stub, tenant = Tenant(daemon.stub(), "a"), (("qkv-tenant", "a"),)
        cache = Cache(stub, "held", layers=1, kv_heads=2, q_heads=2, key_dim=128, value_dim=16)
        request = kv.AppendRequest(items=[cache.item(0, *cache.rows(4096))])
        attend = kv.AttendRequest()
        for i in range(36):
            name = request.items[0].session = f"held-{i}"
            stub.OpenSession(kv.OpenSessionRequest(session=name, model=cache.model.name, retention=kv.RETENTION_EVICT),
                             timeout=TIMEOUT)
            stub.Append(iter([request]), timeout=TIMEOUT)
            attend.items.append(cache.item(4096, q=cache.queries(400)))
            attend.items[-1].session = name
        caches = [Cache(stub, f"s{i}", layers=1, kv_heads=1, q_heads=1) for i in range(9)]
        admin = Admin(daemon)
        admin.set("a", host_bytes=admin.usage("a").host_bytes + 1024)
        attending = daemon.stub().Attend.future(attend, timeout=TIMEOUT, metadata=tenant)
        wait_for(lambda: attend_runs(daemon) > 0, "the attend has not begun")
        calls = []
        for one in caches:
            request = kv.AppendRequest(items=[one.item(0, *one.rows(tokens))])
            calls.append(daemon.stub().Append.future(iter([request]), timeout=TIMEOUT, metadata=tenant))
        wait_for(lambda: daemon.metric("qkvd_sessions_evicted_total") >= 1, "nothing is evicted")
        queued = []
        while len(queued) < 20 and min(queued, default=9) > 2:  # bulk jobs yield to the attend
            time.sleep(0.02)
            queued.append(daemon.metric("qkvd_queue_jobs"))
        assert min(queued) <= 2, "but for the attend, all but one have a thread that may wait, else two"
        assert not any(call.done() for call in (attending, *calls))
        attending.cancel()
        for call in calls:
            assert call.code() in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.mark.parametrize("data_dir", [False, True])
def test_objects_count(tmp_path, data_dir):
    """Without an SSD a put beyond the ceiling is refused; with one the tenant's own leave memory, and come back."""
    where = ("--data-dir", str(tmp_path / "data")) if data_dir else ()
    quotas = tmp_path / "quotas"
    quotas.write_text("a host_bytes=8MiB\n")
    with Daemon("--quota-file", str(quotas), *where) as daemon:
        admin = Admin(daemon)
        stub = Tenant(objects_pb2_grpc.ObjectsStub(daemon.channel()), "a")
        data = {f"o{i}": bytes([i]) * (2 * MIB) for i in range(8)}
        put = []
        for name, value in data.items():
            begin = objects_pb2.ObjectInfo(object=name, bytes=len(value))
            request = objects_pb2.PutObjectsRequest(pieces=[objects_pb2.PutPiece(begin=begin, data=value)])
            try:
                stub.PutObjects(iter([request]), timeout=TIMEOUT)
                put.append(name)
            except grpc.RpcError as error:
                assert not data_dir and error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "quota host_bytes of tenant a is 8388608 bytes" in error.details()
            assert admin.usage("a").host_bytes <= 8 * MIB
        assert len(put) == (8 if data_dir else 3)
        for name in put:
            answers = stub.GetObjects(objects_pb2.GetObjectsRequest(objects=[name]), timeout=TIMEOUT)
            assert b"".join(piece.data for answer in answers for piece in answer.pieces) == data[name]
            assert admin.usage("a").host_bytes <= 8 * MIB
        stub.DeleteObjects(objects_pb2.DeleteObjectsRequest(objects=put), timeout=TIMEOUT)
        wait_for(lambda: admin.usage("a").host_bytes == 0, "memory of deleted objects is counted")


@pytest.mark.parametrize("data_dir", [False, True])
def test_objects_that_may_go_make_place_for_their_tenant(tmp_path, data_dir):
    where = ("--data-dir", str(tmp_path / "data")) if data_dir else ()
    quotas = tmp_path / "quotas"
    quotas.write_text("a host_bytes=8MiB\n")
    with Daemon("--quota-file", str(quotas), *where) as daemon:
        admin = Admin(daemon)
        channel = daemon.channel()
        objects = {tenant: Tenant(objects_pb2_grpc.ObjectsStub(channel), tenant) for tenant in "ab"}

        def put(tenant, name, retention):
            begin = objects_pb2.ObjectInfo(object=name, bytes=2 * MIB, retention=retention,
                                           durability=kv.DURABILITY_MEMORY)
            piece = objects_pb2.PutPiece(begin=begin, data=bytes(2 * MIB))
            objects[tenant].PutObjects(iter([objects_pb2.PutObjectsRequest(pieces=[piece])]), timeout=TIMEOUT)

        def has(tenant, *names):
            answer = objects[tenant].HasObjects(objects_pb2.HasObjectsRequest(objects=names), timeout=TIMEOUT)
            return [at != 0 for at in answer.presence]

        put("b", "oldest", kv.RETENTION_EVICT)
        put("a", "kept", kv.RETENTION_KEEP)
        for i in range(6):
            put("a", f"o{i}", kv.RETENTION_EVICT)
            assert admin.usage("a").host_bytes <= 8 * MIB
        assert has("a", "kept", "o3", "o4", "o5") == [True, False, True, True] and has("b", "oldest") == [True]
        # So it is where a session wants the memory.
        cache = Cache(Tenant(daemon.stub(), "a"), "s", layers=1, kv_heads=8, q_heads=8, key_dim=64, value_dim=64,
                      recent_window=4096, durability=kv.DURABILITY_MEMORY)
        cache.append(0, *cache.rows(576))  # 2.25 MiB, exact
        assert has("a", "kept", "o4") == [True, False] and has("b", "oldest") == [True]
        with pytest.raises(grpc.RpcError) as refusal:
            for i in range(4):
                put("a", f"k{i}", kv.RETENTION_KEEP)
        assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert has("a", "kept", "o5") == [True, False] and has("b", "oldest") == [True]


# ---- The SSD, and kill -9 ----


def test_objects_count_on_the_ssd(tmp_path):
    """A tenant at its ceiling loses the object that it has not used for longest; the count is the same after a crash."""
    quotas = tmp_path / "quotas"
    quotas.write_text("a ssd_bytes=8MiB\n")
    arguments = ("--quota-file", str(quotas), "--data-dir", str(tmp_path / "data"))
    with Daemon(*arguments) as daemon:
        admin = Admin(daemon)
        stub = Tenant(objects_pb2_grpc.ObjectsStub(daemon.channel()), "a")
        put_object(Tenant(objects_pb2_grpc.ObjectsStub(daemon.channel()), "b"), "o0", b"b" * 2 * MIB)
        for i in range(6):
            put_object(stub, f"o{i}", bytes([i]) * (2 * MIB), durability=kv.DURABILITY_SYNC)
            assert 2 * MIB <= admin.usage("a").ssd_bytes <= 8 * MIB
        assert admin.usage("b").ssd_bytes == 2 * MIB
        assert "quota ssd_bytes is full, an object was deleted" in daemon.log_text()
        daemon.kill()
    with Daemon(*arguments) as daemon:
        admin = Admin(daemon)
        stub = Tenant(objects_pb2_grpc.ObjectsStub(daemon.channel()), "a")
        rows = stub.ListObjects(objects_pb2.ListObjectsRequest(), timeout=TIMEOUT).objects
        assert "o5" in [row.object for row in rows] and "o0" not in [row.object for row in rows]
        assert admin.usage("a").ssd_bytes == len(rows) * 2 * MIB <= 8 * MIB
        stub.DeleteObjects(objects_pb2.DeleteObjectsRequest(objects=[row.object for row in rows]), timeout=TIMEOUT)
        assert admin.usage("a").ssd_bytes == 0
        assert admin.usage("b").ssd_bytes == 2 * MIB


def use(daemon, number, stop):
    """Sessions that come and go, and objects, until the daemon is killed."""
    stub = Tenant(daemon.stub(), "a")
    objects = Tenant(objects_pb2_grpc.ObjectsStub(daemon.channel()), "a")
    cache = Cache(Tenant(daemon.stub(), "other"), f"{number}-{time.monotonic_ns()}", layers=1, recent_window=0)
    cache.stub, turn, opened = stub, 0, []
    while True:
        turn += 1
        try:
            put_object(objects, f"o{number}-{turn % 5}", bytes([turn % 256]) * 100000)
            if len(opened) == 3:
                stub.CloseSession(kv.CloseSessionRequest(session=opened.pop(0)), timeout=TIMEOUT)
            cache.name = f"s{time.monotonic_ns()}"
            open_more(stub, cache, cache.name)
            opened.append(cache.name)
            for position in range(0, 1024, 256):
                cache.append(position, *cache.rows(256))
        except grpc.RpcError as error:
            if stop.is_set():
                return
            assert error.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.NOT_FOUND), error


def test_what_is_counted_is_there_after_crashes(tmp_path):
    """kill -9 again and again, while four clients of a tenant fill its quotas: never more than they allow, and nothing
    is counted that is not there."""
    quotas = tmp_path / "quotas"
    quotas.write_text("a host_bytes=4MiB ssd_bytes=2MiB sessions=10\n")
    arguments = ("--quota-file", str(quotas), "--data-dir", str(tmp_path / "data"), "--calibrate-tokens", "0")
    for _ in range(4):
        with Daemon(*arguments) as daemon:
            admin, stop = Admin(daemon), threading.Event()
            stub = Tenant(daemon.stub(), "a")
            found = stub.ListSessions(kv.ListSessionsRequest(tenant="a"), timeout=TIMEOUT).sessions
            assert admin.usage("a").sessions == len(found) <= 10
            for session in found[:5]:
                stub.CloseSession(kv.CloseSessionRequest(session=session.session), timeout=TIMEOUT)
            threads = [threading.Thread(target=use, args=(daemon, i, stop)) for i in range(4)]
            for thread in threads:
                thread.start()
            looks, full = 0, False
            while looks < 50 or not full:
                usage = admin.usage("a")
                assert usage.host_bytes <= 4 * MIB and usage.sessions <= 10
                full |= usage.ssd_bytes > MIB
                looks += 1
                assert all(thread.is_alive() for thread in threads) and looks < 20000
                time.sleep(0.01)
            stop.set()
            daemon.kill()
            for thread in threads:
                thread.join()
    with Daemon(*arguments) as daemon:
        admin = Admin(daemon)
        stub = Tenant(daemon.stub(), "a")
        objects = Tenant(objects_pb2_grpc.ObjectsStub(daemon.channel()), "a")
        assert admin.usage("a").ssd_bytes > 0
        for session in stub.ListSessions(kv.ListSessionsRequest(tenant="a"), timeout=TIMEOUT).sessions:
            stub.CloseSession(kv.CloseSessionRequest(session=session.session), timeout=TIMEOUT)
        names = [row.object for row in objects.ListObjects(objects_pb2.ListObjectsRequest(), timeout=TIMEOUT).objects]
        objects.DeleteObjects(objects_pb2.DeleteObjectsRequest(objects=names), timeout=TIMEOUT)
        wait_for(lambda: admin.usage("a").host_bytes == 0 and admin.usage("a").ssd_bytes == 0 and
                 admin.usage("a").sessions == 0, "what is gone is counted")
