"""SGLang's storage factory, its own host pool and its failure injection, with pages in a real daemon."""

import hashlib

import pytest
from daemon import PATIENCE, Daemon, wait_for
from proxy import Proxy
from readme import configuration
from secured import Secured

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo, MLABufferInfo  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402

import qkvd  # noqa: E402

LAYERS, HEADS, DIM = 3, 2, 16
LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon("--data-dir", str(tmp_path_factory.mktemp("data")), "--limit-models", "1000") as running:
        yield running


@pytest.fixture
def client(daemon):
    with qkvd.Client(daemon.target) as client:
        yield client


def host_pool(layout="page_first", page=64, dtype=torch.float32):
    """A pool of 32 pages; the device's is on the processor, too."""

    def buffers():
        return tuple(torch.zeros(16 * page, HEADS, DIM, dtype=dtype) for _ in range(LAYERS))

    def pointers(tensors):
        return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)

    k, v = buffers(), buffers()
    info = MHABufferInfo(
        buffers=KVBuffers(k=k, v=v, k_data_ptrs=pointers(k), v_data_ptrs=pointers(v), layout=KVBufferLayout.NHD),
        page_size=page, head_num=HEADS, head_dim=DIM, v_head_dim=DIM, dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    return MHATokenToKVPoolHost(
        info, 2.0, 0, page, layout, pin_memory=False, device="cpu", device_capacity_tokens=16 * page, start_layer=0,
        end_layer=LAYERS - 1,
    )  # fmt: skip


def latent_pool(layout, page=64, rank=64, rope=16, dtype=torch.bfloat16):
    """Of a model with MLA."""
    buffers = tuple(torch.zeros(16 * page, 1, rank + rope, dtype=dtype) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=buffers, data_ptrs=torch.tensor([one.data_ptr() for one in buffers], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)), device_layer_num=LAYERS, page_size=page, kv_lora_rank=rank,
        qk_rope_head_dim=rope, kv_cache_dim=rank + rope, dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    return MLATokenToKVPoolHost(
        info, 2.0, 0, page, layout, pin_memory=False, device="cpu", device_capacity_tokens=16 * page, start_layer=0,
        end_layer=LAYERS - 1, target_layer_num=LAYERS,
    )  # fmt: skip


def backend(daemon, pool, name, mla=False, tp=(0, 1), **settings):
    """As SGLang makes one."""
    extra = configuration("--hicache-storage-backend-extra-config")
    extra |= {"target": daemon.target, "bits": "exact", "model_name": name} | settings
    config = HiCacheStorageConfig(
        tp_rank=tp[0], tp_size=tp[1], pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=mla,
        enable_storage_metrics=False, is_page_first_layout=False, model_name="m", extra_config=extra,
    )  # fmt: skip
    made = StorageBackendFactory.create_backend("dynamic", config, pool)
    made.register_mem_pool_host(pool)
    return made


def chain(count, seed=""):
    """Names of pages, each a hash of the one before."""
    keys = []
    for place in range(count):
        keys.append(hashlib.sha256(f"{seed}{keys[-1] if keys else ''}{place}".encode()).hexdigest())
    return keys


def places(pool, pages):
    return torch.cat([torch.arange(page * pool.page_size, (page + 1) * pool.page_size) for page in pages])


def after(keys):
    return HiCacheStorageExtraInfo(prefix_keys=keys)


def page(pool, number):
    return pool.get_data_page(number * pool.page_size).clone()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_come_back_as_they_were(daemon, layout, size, dtype):
    pool = host_pool(layout, size, dtype)
    name = f"{layout}-{size}-{dtype}".replace("torch.", "")
    store = backend(daemon, pool, name)
    pool.kv_buffer.normal_()
    keys = chain(8, name)
    sources, targets = [3, 1, 0, 7, 9, 4, 2, 11], [12, 20, 13, 19, 14, 18, 15, 17]
    assert store.batch_exists(keys, after([])) == 0
    # In two batches, as SGLang backs up.
    assert store.batch_set_v1(keys[:5], places(pool, sources[:5]), after([])) == [True] * 5
    assert store.batch_set_v1(keys[5:], places(pool, sources[5:]), after(keys[:5])) == [True] * 3
    other = backend(daemon, pool, name)  # another process
    assert other.batch_exists(keys, after([])) == 8
    assert other.batch_exists(keys[2:] + chain(2, "else"), after(keys[:2])) == 6
    assert other.batch_get_v1(keys, places(pool, targets), after([])) == [True] * 8
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(page(pool, source), page(pool, target))
    store.close()
    other.close()


def test_branches_share_what_they_have_in_common(daemon, client):
    pool = host_pool()
    store = backend(daemon, pool, "branches")
    pool.kv_buffer.normal_()
    trunk = chain(4, "trunk")
    assert all(store.batch_set_v1(trunk, places(pool, range(4)), after([])))
    one, two = chain(2, "one"), chain(2, "two")
    assert all(store.batch_set_v1(one, places(pool, [4, 5]), after(trunk)))
    assert all(store.batch_set_v1(two, places(pool, [6, 7]), after(trunk)))
    # In another process, which finds the trunk by its pages.
    other = backend(daemon, pool, "branches")
    three = chain(1, "three")
    assert all(other.batch_set_v1(three, places(pool, [8]), after(trunk)))
    for branch, sources in ((one, [4, 5]), (two, [6, 7]), (three, [8])):
        keys = trunk + branch
        assert other.batch_exists(keys, after([])) == len(keys)
        assert all(other.batch_get_v1(keys, places(pool, range(20, 20 + len(keys))), after([])))
        for place, source in enumerate([0, 1, 2, 3, *sources]):
            assert torch.equal(page(pool, source), page(pool, 20 + place))
    # A page whose predecessors are not held is not kept.
    assert other.batch_set_v1(chain(1, "x"), places(pool, [9]), after(chain(3, "unknown"))) == [False]
    store.close()
    other.close()


@pytest.mark.parametrize("kind", ["latents", "fp8", "opaque"])
@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_pages_that_are_no_plain_rows(daemon, client, kind, layout):
    """Kept as the bytes that they are."""
    pool = (
        latent_pool(layout) if kind == "latents" else host_pool(layout, 64, torch.uint8 if kind == "fp8" else torch.float16)
    )
    settings = {"opaque": True} if kind == "opaque" else {}
    name, mla = f"{kind}-{layout}", kind == "latents"
    store = backend(daemon, pool, name, mla, (0, 2), **settings)
    pool.kv_buffer.copy_(torch.randint(0, 100, pool.kv_buffer.shape).to(pool.kv_buffer.dtype))
    keys, sources, targets = chain(6, name), [3, 1, 0, 7, 9, 4], [12, 20, 13, 19, 14, 18]
    before = len(list(client.objects()))
    assert store.batch_exists(keys, after([])) == 0
    assert store.batch_set_v1(keys[:4], places(pool, sources[:4]), after([])) == [True] * 4
    assert store.batch_set_v1(keys, places(pool, sources), after([])) == [True] * 6
    assert len(list(client.objects())) == before + 6
    # Latents are the same on all tensor-parallel ranks, keys and values are not.
    other = backend(daemon, pool, name, mla, (1, 2), **settings)
    assert other.batch_exists(keys, after([])) == (6 if mla else 0)
    again = backend(daemon, pool, name, mla, (0, 2), **settings)
    assert again.batch_exists(keys + chain(2, "else"), after([])) == 6
    asked = [*keys[:5], "nobody's"]
    assert again.batch_get_v1(asked, places(pool, targets), after([])) == [True] * 5 + [False]
    for source, target in zip(sources[:5], targets[:5], strict=True):
        assert torch.equal(page(pool, source), page(pool, target))
    assert not torch.equal(page(pool, sources[5]), page(pool, targets[5]))
    for made in (store, other, again):
        made.close()


def test_what_is_not_there_is_a_miss(daemon):
    pool = host_pool()
    store = backend(daemon, pool, "misses")
    pool.kv_buffer.normal_()
    keys = chain(3, "misses")
    before = pool.kv_buffer.clone()
    assert store.batch_get_v1(keys, places(pool, range(3)), after([])) == [False] * 3
    assert all(store.batch_set_v1(keys[:2], places(pool, [0, 1]), after([])))
    assert store.batch_get_v1(keys, places(pool, [0, 1, 2]), after([])) == [True, True, False]
    assert torch.equal(before, pool.kv_buffer)
    # Without the chain nothing is found or kept.
    assert store.batch_exists(keys, after(None)) == 0
    assert store.batch_set_v1(keys, places(pool, range(3)), None) == [False] * 3
    assert store.batch_get(keys) == [None] * 3
    store.close()


def test_settings_are_checked(daemon):
    pool = host_pool()
    with pytest.raises(qkvd.InvalidArgument, match='"interface_v1": 1'):
        backend(daemon, pool, "m", interface_v1=0)
    with pytest.raises(qkvd.InvalidArgument, match="'bit' is no option"):
        backend(daemon, pool, "m", bit=4)


def test_failure_injection(daemon):
    """SGLang's own: calls fail at random; what comes is right."""
    pool = host_pool()
    with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.3):
        store = backend(daemon, pool, "injected")
    pool.kv_buffer.normal_()
    keys = chain(8, "injected")
    saved = 0
    while saved < 8:
        if all(store.batch_set_v1(keys[saved : saved + 1], places(pool, [saved]), after(keys[:saved]))):
            saved += 1
    loaded = failed = 0
    for _ in range(40):
        pool.kv_buffer[:, 20 * 64 : 28 * 64] = 0
        found = store.batch_exists(keys, after([]))
        came = store.batch_get_v1(keys[:found], places(pool, range(20, 20 + found)), after([])) if found else []
        loaded, failed = loaded + sum(came), failed + (found == 0) + came.count(False)
        for place, good in enumerate(came):
            assert not good or torch.equal(page(pool, place), page(pool, 20 + place))
    assert loaded and failed
    store.close()


@pytest.mark.parametrize("settings", [{}, {"opaque": True}], ids=["rows", "bytes"])
def test_mutual_tls(tmp_path, settings):
    pool = host_pool()
    pool.kv_buffer.normal_()
    keys = chain(3, "tls")
    with Secured(tmp_path) as daemon:
        store = backend(daemon, pool, "tls", **daemon.settings, **settings)
        assert all(store.batch_set_v1(keys, places(pool, range(3)), after([])))
        assert store.batch_exists(keys, after([])) == 3
        assert all(store.batch_get_v1(keys, places(pool, range(20, 23)), after([])))
        for place in range(3):
            assert torch.equal(page(pool, place), page(pool, 20 + place))
        stranger = backend(daemon, pool, "tls", target=daemon.tcp, timeout=5.0, **settings)
        assert stranger.batch_set_v1(keys, places(pool, range(3)), after([])) == [False] * 3
        store.close()
        stranger.close()


@pytest.mark.parametrize("settings", [{}, {"opaque": True}], ids=["rows", "bytes"])
def test_a_daemon_killed_in_the_middle_of_a_load(settings):
    """Pages that have not come whole are misses, and saved again once the daemon is back."""
    pool = host_pool()
    pool.kv_buffer.normal_()
    keys = chain(10, "killed")
    with Daemon() as daemon, Proxy(daemon.target) as proxy:
        store = backend(daemon, pool, "killed", target=proxy.target, **settings)
        assert all(store.batch_set_v1(keys, places(pool, range(10)), after([])))
        proxy.after(200_000, daemon.kill)  # of 491,520
        came = store.batch_get_v1(keys, places(pool, range(20, 30)), after([]))
        wait_for(lambda: daemon.process.poll() is not None, "the load has ended before it was broken off")
        assert not all(came)
        for place, good in enumerate(came):
            assert not good or torch.equal(page(pool, place), page(pool, 20 + place))
        assert store.batch_exists(keys, after([])) == 0
        daemon.start()
        again = places(pool, range(10))
        wait_for(lambda: all(store.batch_set_v1(keys, again, after([]))), "the daemon is not used again")
        assert all(store.batch_get_v1(keys, places(pool, range(20, 30)), after([])))
        store.close()


@pytest.mark.parametrize("settings", [{}, {"opaque": True}])
def test_a_daemon_that_does_not_answer_is_left_alone(settings, monkeypatch):
    """What SGLang saves waits for it once, and not again for each batch: its pages cannot leave their pool meanwhile."""
    pool = host_pool()
    keys = chain(6, "silent")
    with Daemon() as daemon:
        store = backend(daemon, pool, "silent", timeout=1.0, **settings)
        assert all(store.batch_set_v1(keys[:2], places(pool, [0, 1]), after([])))
        with daemon.stopped():
            calls, call = [], store._prefixes._guarded
            monkeypatch.setattr(store._prefixes, "_guarded", lambda made: calls.append(made) or call(made))
            monkeypatch.setattr(store._prefixes.breaker, "FIRST", PATIENCE)
            asked = []
            for known in (2, 4):
                pages = places(pool, [known, known + 1])
                assert not any(store.batch_set_v1(keys[known : known + 2], pages, after(keys[:known])))
                asked.append(len(calls))
        assert asked == [1, 1]
        store.close()


def test_a_daemon_that_dies_and_comes_back(daemon):
    pool = host_pool()
    # Coded: of exact rows a daemon that began anew does not know the names.
    store = backend(daemon, pool, "dies", bits=8, durability="sync", timeout=30.0, lookup_timeout=10.0)
    pool.kv_buffer.normal_()
    keys = chain(6, "dies")
    assert all(store.batch_set_v1(keys[:4], places(pool, range(4)), after([])))
    daemon.kill()
    assert store.batch_exists(keys, after([])) == 0
    assert store.batch_get_v1(keys[:4], places(pool, range(20, 24)), after([])) == [False] * 4
    assert store.batch_set_v1(keys[4:], places(pool, [4, 5]), after(keys[:4])) == [False] * 2
    daemon.start()
    wait_for(lambda: store.batch_exists(keys, after([])) == 4, "the daemon is not used again")
    assert all(store.batch_set_v1(keys[4:], places(pool, [4, 5]), after(keys[:4])))
    assert all(store.batch_get_v1(keys, places(pool, range(20, 26)), after([])))
    for place in range(6):
        torch.testing.assert_close(page(pool, place), page(pool, 20 + place), atol=0.05, rtol=0)
    store.close()
