"""Watch: what prefixes come and go."""

import json
import signal
import subprocess
import threading
import time

import grpc
import numpy as np
import pytest

from daemon import PATIENCE, SANITIZED, Daemon, binary, clean_environment, wait_for
from kv import TIMEOUT, Cache, Tenant, refused
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import tensor_pb2

CHANGES_KNOWN = 65536  # QKVI_WATCH_RING
ADDED, REMOVED, MOVED = kv.PrefixEvent.KIND_ADDED, kv.PrefixEvent.KIND_REMOVED, kv.PrefixEvent.KIND_MOVED


def prompt(count, seed=1):
    return [int(x) for x in np.random.default_rng(seed).integers(0, 1 << 32, count)]


class Router:
    """A reader that keeps what it is told: hash -> (parent, tenant, model, position, ids or None, on the SSD)."""

    def __init__(self, stub, **fields):
        self.call = stub.Watch(kv.WatchRequest(**fields))
        self.pages, self.resets, self.missed, self.complete, self.error = {}, 0, 0, 0, None
        self.last = None
        self.go = threading.Event()
        self.go.set()
        self.thread = threading.Thread(target=self.read)
        self.thread.start()

    def read(self):
        try:
            for message in self.call:
                self.take(message)
                self.go.wait()
        except grpc.RpcError as error:
            self.error = error.code()

    def take(self, message):
        pages = {} if message.reset else dict(self.pages)
        self.resets += message.reset
        self.missed += message.missed
        for event in message.events:
            hashes = [event.hashes[i:i + 16] for i in range(0, len(event.hashes), 16)]
            parents = [event.parent, *hashes]
            assert len(event.token_ids) in (0, 64 * len(hashes))
            for i, hash in enumerate(hashes):
                if event.kind == ADDED:
                    ids = list(event.token_ids[64 * i:64 * i + 64]) or (pages[hash][4] if hash in pages else None)
                    pages[hash] = (parents[i], event.tenant, event.model, event.position + 64 * i, ids, False)
                elif event.kind == REMOVED:
                    pages.pop(hash, None)
                elif hash in pages:
                    pages[hash] = (*pages[hash][:5], event.place == kv.PrefixEvent.PLACE_SSD)
        self.pages = pages
        self.complete += message.complete
        self.last = message

    def chain(self, ids, root):
        """How many of the pages of these ids are known, one after the other."""
        at, count = root, 0
        while True:
            found = [h for h, page in self.pages.items() if page[0] == at and page[3] == 64 * count
                     and (page[4] is None or page[4] == ids[64 * count:64 * count + 64])]
            if not found:
                return count
            at, count = found[0], count + 1

    def wait(self, condition, what="the watch"):
        def done():
            ended = self.error  # what came before it has been taken
            if condition(self):
                return True
            assert ended is None, f"the call ended: {ended}"
            return False

        wait_for(done, what)

    def end(self):
        self.go.set()
        self.call.cancel()
        self.thread.join()


@pytest.fixture
def watch(stub):
    routers = []

    def make(**fields):
        routers.append(Router(fields.pop("stub", stub), **fields))
        return routers[-1]

    yield make
    for router in routers:
        router.end()


def fill(cache, ids, position=0, name=None, layers=1, tenant=""):
    before, cache.name = cache.name, name or cache.name
    stub, cache.stub = cache.stub, Tenant(cache.stub, tenant)
    try:
        for layer in range(layers):
            cache.append(position, *cache.rows(len(ids)), layer=layer, token_ids=ids if layer == 0 else [])
        return cache.info().prefix_root
    finally:
        cache.name, cache.stub = before, stub


def open_session(stub, cache, name, **fields):
    stub.OpenSession(kv.OpenSessionRequest(session=name, model=cache.model.name, **fields), timeout=TIMEOUT)


@pytest.mark.parametrize("ids_too", [False, True])
def test_snapshot_and_changes(stub, make_cache, watch, ids_too):
    cache = make_cache(layers=1)
    ids = prompt(700)
    root = fill(cache, ids[:300])
    router = watch(model=cache.model.name, token_ids=ids_too)
    router.wait(lambda r: r.complete)
    assert router.resets == 1 and router.chain(ids, root) == 4 == len(router.pages)
    assert all((page[4] is not None) == ids_too for page in router.pages.values())
    assert {page[1:3] for page in router.pages.values()} == {("default", cache.model.name)}
    fill(cache, ids[300:], 300)
    router.wait(lambda r: len(r.pages) == 10)
    assert router.chain(ids, root) == 10
    # Held twice: nothing is added, and nothing goes before the last has gone.
    stub.Fork(kv.ForkRequest(session=cache.name, fork=cache.name + "f"), timeout=TIMEOUT)
    stub.Truncate(kv.TruncateRequest(session=cache.name, position=128), timeout=TIMEOUT)
    fill(cache, prompt(100, 2), 128)
    router.wait(lambda r: len(r.pages) == 11)
    stub.CloseSession(kv.CloseSessionRequest(session=cache.name + "f"), timeout=TIMEOUT)
    router.wait(lambda r: len(r.pages) == 3)
    stub.CloseSession(kv.CloseSessionRequest(session=cache.name), timeout=TIMEOUT)
    router.wait(lambda r: not r.pages)
    assert (router.resets, router.missed) == (1, 0)


def test_tenants_and_models(stub, make_cache, watch):
    cache, other = make_cache(layers=1, shared=True), make_cache(layers=1)
    ids = prompt(128)
    fill(cache, ids)
    fill(other, ids)
    open_session(stub, cache, cache.name + "t", tenant="t")
    one, mine = watch(tenant="t"), watch(model=cache.model.name)
    fill(cache, ids, name=cache.name + "t", tenant="t")
    one.wait(lambda r: len(r.pages) == 2)
    assert {page[1:3] for page in one.pages.values()} == {("t", cache.model.name)}
    mine.wait(lambda r: len(r.pages) == 4)
    assert {page[1] for page in mine.pages.values()} == {"default", "t"}
    with refused(grpc.StatusCode.INVALID_ARGUMENT, "tenant"):
        next(stub.Watch(kv.WatchRequest(tenant="no name"), timeout=TIMEOUT))


def test_a_watch_goes_on_where_it_ended(stub, make_cache, watch):
    cache = make_cache(layers=1)
    ids = prompt(1000)
    fill(cache, ids[:128])
    router = watch(model=cache.model.name)
    router.wait(lambda r: r.complete and len(r.pages) == 2)
    keeper = watch()  # while somebody watches changes are known
    keeper.wait(lambda r: r.complete)
    last = router.last
    router.end()
    fill(cache, ids[128:640], 128)
    again = watch(model=cache.model.name, instance=last.instance, after=last.sequence)
    again.wait(lambda r: len(r.pages) >= 8)
    assert again.resets == 0
    other = watch(model=cache.model.name, instance=last.instance + 1, after=last.sequence)
    other.wait(lambda r: r.complete)
    assert other.resets == 1 and len(other.pages) == 10 and keeper.resets == 1


def test_sequences_do_not_count_changes(stub, make_cache, watch):
    """They would tell a tenant how much others change: differences of what it is told have nothing to do with that."""
    cache = make_cache(layers=1)
    ids = prompt(64 * 20)
    fill(cache, ids[:64])
    router = watch(model=cache.model.name)
    router.wait(lambda r: r.complete and len(r.pages) == 1)
    told = [router.last.sequence]
    for i in range(1, 20):
        fill(cache, ids[64 * i:64 * i + 64], 64 * i)
        router.wait(lambda r, known=i + 1: len(r.pages) == known)
        told.append(router.last.sequence)
    assert len(set(told)) == 20 and max(told) < 1 << 52
    assert all(abs(b - a) > 1 << 20 for a, b in zip(told, told[1:])), told
    again = watch(model=cache.model.name, instance=router.last.instance, after=1 << 63)  # none of its own
    again.wait(lambda r: r.complete)
    assert again.resets == 1 and len(again.pages) == 20


def test_what_happened_while_nobody_watched_comes_with_a_snapshot(tmp_path):
    with Daemon() as daemon:
        stub = daemon.stub()
        cache = Cache(stub, "s", layers=1, kv_heads=1, q_heads=1, key_dim=16, value_dim=16)
        ids = prompt(640)
        root = fill(cache, ids[:64])
        router = Router(stub)
        router.wait(lambda r: r.complete)
        fill(cache, ids[64:128], 64)
        router.wait(lambda r: len(r.pages) == 2 and r.last.sequence > 0)
        router.end()
        wait_for(lambda: daemon.metric("qkvd_watchers") == 0, "the watcher")
        fill(cache, ids[128:], 128)
        again = Router(stub, instance=router.last.instance, after=router.last.sequence)
        try:
            again.wait(lambda r: r.complete and r.chain(ids, root) == 10)
            assert again.resets == 1
        finally:
            again.end()


def test_a_reader_that_stalls_starts_again(watch, tmp_path):
    with Daemon("--limit-watchers", "1", "--calibrate-tokens", "0", "--limit-unread-response", "0") as daemon:
        stub = daemon.stub()
        cache = Cache(stub, "base", layers=1, kv_heads=1, q_heads=1, key_dim=16, value_dim=16)
        router = Router(stub, token_ids=True)
        try:
            router.wait(lambda r: r.complete)
            with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "limit-watchers is 1, all are in use"):
                next(daemon.stub().Watch(kv.WatchRequest(), timeout=TIMEOUT))
            router.go.clear()  # reads no more
            rows = cache.rows(8192)
            slowest, changes, count = 0, 0, 0
            # What the reader has not been sent yet must be more than is known, whatever the connection's buffers hold.
            while changes - daemon.metric("qkvd_watch_events_total") <= CHANGES_KNOWN:
                assert count < 3000, "a reader that does not read is sent everything"
                open_session(stub, cache, f"s{count}")
                begin = time.monotonic()
                cache.name = f"s{count}"
                cache.append(0, *rows, token_ids=prompt(8192, count))
                changes += 128
                if count > 0:
                    stub.CloseSession(kv.CloseSessionRequest(session=f"s{count - 1}"), timeout=TIMEOUT)
                    changes += 128
                slowest = max(slowest, time.monotonic() - begin)
                count += 1
            assert slowest < 10
            root = cache.info().prefix_root
            router.go.set()
            router.wait(lambda r: r.missed)
            router.wait(lambda r: r.chain(prompt(8192, count - 1), root) == 128 and len(r.pages) == 128)
            assert daemon.metric("qkvd_watch_missed_total") >= 1 and daemon.metric("qkvd_watchers") == 1
        finally:
            router.end()
        wait_for(lambda: daemon.metric("qkvd_watchers") == 0, "the watcher")


def test_places_and_a_restart(tmp_path):
    ids = prompt(512)
    with Daemon("--data-dir", str(tmp_path), "--fold-after", "1ms") as daemon:
        stub = daemon.stub()
        cache = Cache(stub, "s", layers=2, durability=kv.DURABILITY_ASYNC)
        root = fill(cache, ids, layers=2)
        router = Router(stub, token_ids=True)
        router.wait(lambda r: r.complete and len(r.pages) == 8)
        assert not any(page[5] for page in router.pages.values())
        stub.CloseSession(kv.CloseSessionRequest(session="s", keep=True), timeout=TIMEOUT)
        router.wait(lambda r: all(page[5] for page in r.pages.values()))
        # Another one that comes later is told, too, and the session stays folded.
        wait_for(lambda: daemon.metric("qkvd_storage_folded_sessions") == 1, "the session to be folded")
        late = Router(stub)
        late.wait(lambda r: len(r.pages) == 8 and all(page[5] for page in r.pages.values()))
        assert daemon.metric("qkvd_storage_unfolded_sessions_total") == 0
        for layer in range(2):
            cache.fetch((layer,))
        router.wait(lambda r: not any(page[5] for page in r.pages.values()))
        instance = router.last.instance
        daemon.terminate()
        router.thread.join(PATIENCE)
        late.thread.join(PATIENCE)
        assert daemon.wait() == 0
        assert (router.error, late.error) == (grpc.StatusCode.UNAVAILABLE,) * 2
    with Daemon("--data-dir", str(tmp_path)) as daemon:
        router = Router(daemon.stub(), token_ids=True, instance=instance, after=router.last.sequence)
        try:
            router.wait(lambda r: r.complete and len(r.pages) == 8 and all(page[5] for page in r.pages.values()))
            assert router.resets == 1 and router.last.instance != instance
            assert router.chain(ids, root) == 8  # by hashes: the ids are gone
            assert all(page[4] is None for page in router.pages.values())
        finally:
            router.end()


def test_ids_of_folded_sessions(tmp_path):
    """They are read from the SSD, and the sessions stay folded. Others are served meanwhile."""
    count, ids = 20, prompt(700)
    with Daemon("--data-dir", str(tmp_path), "--fold-after", "1ms", "--calibrate-tokens", "0") as daemon:
        stub = daemon.stub()
        cache = Cache(stub, "s", layers=1, durability=kv.DURABILITY_ASYNC, recent_window=0)
        root = fill(cache, ids)
        names, prompts = ["s"], [ids]
        for i in range(count):
            names.append(f"t{i}")
            prompts.append(prompt(300, i + 2))
            open_session(stub, cache, names[-1])
            fill(cache, prompts[-1], name=names[-1])
        # What it shares with its parent, and pages of its own.
        stub.Fork(kv.ForkRequest(session="s", fork="f", position=256), timeout=TIMEOUT)
        names.append("f")
        prompts.append(ids[:256] + prompt(256, 99))
        fill(cache, prompts[-1][256:], 256, name="f")
        for name in names:
            stub.CloseSession(kv.CloseSessionRequest(session=name, keep=True), timeout=TIMEOUT)
        wait_for(lambda: daemon.metric("qkvd_storage_folded_sessions") > count, "the sessions to be folded")
        before = daemon.metric("qkvd_storage_unfolded_sessions_total")
        router = Router(stub, token_ids=True)
        try:
            router.wait(lambda r: r.complete)
            assert len(router.pages) == 10 + 4 * count + 4
            assert all(page[4] is not None for page in router.pages.values())
            assert [router.chain(known, root) for known in prompts] == [len(known) // 64 for known in prompts]
        finally:
            router.end()
        for i, (name, known) in enumerate(zip(names[1:], prompts[1:])):  # they are found as before
            request = kv.GetSessionRequest(session=name, token_ids=tensor_pb2.TokenRange(begin=0))
            assert list(stub.GetSession(request, timeout=TIMEOUT).token_ids) == known
            if i == 0:  # the metric is brought up to date by that
                assert daemon.metric("qkvd_storage_unfolded_sessions_total") == before + 1
            cache.name = name
            cache.fetch((0,))


def test_thousands_of_sessions(daemon, stub, make_cache, watch):
    """Sessions come and go during snapshots; in the end all readers know the same, and it is what there is."""
    cache = make_cache(layers=1)
    rows = cache.rows(64)
    routers = [watch(model=cache.model.name, token_ids=bool(i % 2)) for i in range(2)]
    kept = set()
    sessions = 500 if SANITIZED else 2000
    for i in range(sessions):
        name = f"{cache.name}-{i}"
        open_session(stub, cache, name)
        cache.name, before = name, cache.name
        cache.append(0, *rows, token_ids=prompt(64, i))
        cache.name = before
        if i % 3:
            stub.CloseSession(kv.CloseSessionRequest(session=name), timeout=TIMEOUT)
        else:
            kept.add(tuple(prompt(64, i)))
        if i % (sessions // 4) == sessions // 8:
            routers.append(watch(model=cache.model.name, token_ids=True))
    # A reader that lags behind passes through states with as many pages: what counts is which.
    for router in routers[1:]:
        router.wait(lambda r: r.complete and {tuple(page[4]) for page in r.pages.values()} == kept)
    for router in routers:
        router.wait(lambda r: r.complete and r.pages.keys() == routers[1].pages.keys())


def test_qkvctl_watch(daemon, stub, make_cache):
    cache = make_cache(layers=1)
    ids = prompt(128)
    fill(cache, ids)

    def run(*more):
        return subprocess.Popen([binary("qkvctl"), "watch", "--target", daemon.target, "--model", cache.model.name, *more],
                                env=clean_environment(), stdout=subprocess.PIPE, text=True)

    with run("--json", "--ids") as process:
        seen = []
        while not (seen and seen[-1]["complete"]):
            seen.append(json.loads(process.stdout.readline()))
        assert seen[0]["reset"]
        events = [event for message in seen for event in message["events"] if event["token_ids"]]
        assert [(e["event"], e["position"], len(e["hashes"]), e["token_ids"], e["place"]) for e in events] == [
            ("added", 0, 2, ids, "memory")]
        process.send_signal(signal.SIGTERM)  # SIGINT is ignored where the tests run in the background
    with run() as process:
        assert process.stdout.readline() == "what there is:\n"
        line = process.stdout.readline()
        assert line.startswith(f"added    default {cache.model.name} positions 0 to 128, the last page ")
        assert process.stdout.readline() == "what changes:\n"
        stub.CloseSession(kv.CloseSessionRequest(session=cache.name), timeout=TIMEOUT)
        assert process.stdout.readline().startswith("removed  default ")
        process.send_signal(signal.SIGTERM)  # SIGINT is ignored where the tests run in the background
