"""LMCache's own check of adapters, and chunks of its kind in a real daemon."""

import json
import os
import select
import subprocess
import sys

import pytest
from daemon import Daemon, clean_environment, wait_for
from proxy import Proxy
from readme import configuration
from secured import Secured

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache")
os.environ["LMCACHE_TRACK_USAGE"] = "false"

from lmcache.v1.distributed.api import ObjectKey  # noqa: E402
from lmcache.v1.distributed.l2_adapters import create_l2_adapter as create  # noqa: E402
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config  # noqa: E402
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj  # noqa: E402
from lmcache.v1.platform import consume_fd  # noqa: E402

import qkvd  # noqa: E402

LAYERS, TOKENS, HEADS, DIM = 3, 256, 2, 64


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon("--data-dir", str(tmp_path_factory.mktemp("data")), "--limit-models", "1000") as running:
        yield running


def adapter(daemon, **settings):
    """As LMCache's server makes one."""
    spec = configuration("--l2-adapter")
    spec["adapter_params"] |= {"target": daemon.target, "kv_heads": HEADS, "timeout": 30.0} | settings

    class Arguments:
        l2_adapter = [json.dumps(spec)]  # noqa: RUF012

    (config,) = parse_args_to_l2_adapters_config(Arguments).adapters
    return create(config)


def chunk(shape, dtype=torch.float32, fill=True):
    data = torch.randn(shape, dtype=torch.float32).to(dtype) if fill else torch.zeros(shape, dtype=dtype)
    flat = data.flatten()
    metadata = MemoryObjMetadata(
        shape=torch.Size(shape), dtype=dtype, address=flat.data_ptr(), phy_size=flat.nbytes, fmt=MemoryFormat.KV_2LTD,
        ref_count=1,
    )  # fmt: skip
    return TensorMemoryObj(flat, metadata, parent_allocator=None)


def key(name, **more):
    return ObjectKey(chunk_hash=name.encode(), model_name="org/model", kv_rank=0, **more)


def wait(descriptor):
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(240_000), "a task does not end"
    consume_fd(descriptor)


def store(made, keys, chunks):
    task = made.submit_store_task(keys, chunks)
    wait(made.get_store_event_fd())
    return made.pop_completed_store_tasks()[task].is_successful()


def look_up(made, keys):
    task = made.submit_lookup_and_lock_task(keys, {})
    wait(made.get_lookup_and_lock_event_fd())
    bitmap = made.query_lookup_and_lock_result(task)
    assert made.query_lookup_and_lock_result(task) is None
    return [bitmap.test(place) for place in range(len(keys))]


def load(made, keys, chunks):
    task = made.submit_load_task(keys, chunks)
    wait(made.get_load_event_fd())
    bitmap = made.query_load_result(task)
    return [bitmap.test(place) for place in range(len(keys))]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mode", "test_l2_adapter", "--l2-adapter"],
        ["--mode", "test_remote"],
    ],
    ids=["server", "in-process"],
)
def test_lmcaches_own_check(daemon, tmp_path, arguments):
    spec = {
        "type": "plugin", "module_path": "qkvd.lmcache", "class_name": "QkvdL2Adapter",
        "adapter_params": {"target": daemon.target},
    }  # fmt: skip
    config = tmp_path / "lmcache.yaml"
    plugin = "remote_storage_plugin.qkvd."
    config.write_text(
        "chunk_size: 256\nremote_url: plugin://qkvd\n"
        "local_cpu: true\nmax_local_cpu_size: 1\nremote_storage_plugins: [qkvd]\nextra_config:\n"
        f"  {plugin}module_path: qkvd.lmcache\n  {plugin}class_name: QkvdConnectorAdapter\n"
        f"  {plugin}target: {daemon.target}\n  {plugin}bits: exact\n  {plugin}kv_heads: 1\n"
    )
    if arguments[-1] == "--l2-adapter":
        arguments = [*arguments, json.dumps(spec)]
    made = subprocess.run(
        [sys.executable, "-m", "lmcache.v1.basic_check", "--num-keys", "5", *arguments],
        capture_output=True, text=True, env=clean_environment(LMCACHE_TRACK_USAGE="false", LMCACHE_CONFIG_FILE=str(config)),
    )  # fmt: skip
    print(made.stdout)
    rows = [line for line in made.stdout.splitlines() if line.startswith("| ") and "/" in line and "Pass/All" not in line]
    assert len(rows) >= 3, made.stdout + made.stderr
    assert all("5/5" in row for row in rows), made.stdout + made.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [(LAYERS, TOKENS, HEADS * 2 * DIM), (2, LAYERS, TOKENS, HEADS * DIM), (LAYERS, 100, HEADS * 2 * DIM), (8192,)],
    ids=["together", "apart", "short", "numbers"],
)
def test_chunks_come_back_as_they_were(daemon, shape, dtype):
    made, again = adapter(daemon, bits="exact"), adapter(daemon, bits="exact")
    keys = [key(f"{shape}{dtype}{place}") for place in range(3)]
    chunks = [chunk(shape, dtype) for _ in range(3)]
    assert look_up(made, keys) == [False] * 3
    assert store(made, keys[:2], chunks[:2])
    assert store(again, keys[:2], chunks[:2]), "to store a chunk again is fine"
    assert look_up(again, keys) == [True, True, False]
    empty = [chunk(shape, dtype, fill=False) for _ in range(3)]
    assert load(again, keys, empty) == [True, True, False]
    for came, was in zip(empty[:2], chunks[:2], strict=True):
        assert torch.equal(came.tensor, was.tensor)
    again.delete(keys[:1])
    assert look_up(made, keys) == [False, True, False]
    made.close()
    again.close()


def test_what_users_take_is_accounted(daemon):
    """LMCache's quotas of users go by it: what is deleted is taken no more."""
    made = adapter(daemon, bits="exact")
    keys = [key("ours", cache_salt="alice"), key("theirs", cache_salt="bob")]
    chunks = [chunk((8192,)), chunk((8192,))]
    assert store(made, keys, chunks)
    assert store(made, keys[:1], chunks[:1]), "to store a chunk again takes nothing"
    assert dict(made.get_usage().bytes_by_cache_salt) == {"alice": 32768, "bob": 32768}
    made.delete([*keys[:1], key("nobody's", cache_salt="bob")])
    usage = made.get_usage()
    assert (usage.total_bytes_used, dict(usage.bytes_by_cache_salt)) == (32768, {"bob": 32768})
    made.close()


def test_a_chunk_that_the_daemon_has_closed_is_deleted(daemon):
    """As one that was evicted or has expired: what it took is taken no more, and once more is no error."""
    made, closed = adapter(daemon, bits="exact"), key("closed", cache_salt="carol")
    with qkvd.Client(daemon.target) as client:
        before = {info.session for info in client.sessions()}
        assert store(made, [closed], [chunk((LAYERS, TOKENS, HEADS * 2 * DIM))])
        (session,) = {info.session for info in client.sessions()} - before
        client.close_session(session)
    assert made.get_usage().bytes_by_cache_salt["carol"] > 0
    for _ in range(2):
        made.delete([closed])
        usage = made.get_usage()
        assert (usage.total_bytes_used, usage.bytes_by_cache_salt.get("carol", 0)) == (0, 0)
        assert look_up(made, [closed]) == [False]
    made.close()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.int64])
def test_bytes_come_back_as_they_were(daemon, dtype):
    made = adapter(daemon, bits=4)
    was, came = chunk((3, 100, 7), dtype, fill=False), chunk((3, 100, 7), dtype, fill=False)
    was.tensor.view(torch.uint8).random_(0, 256)
    assert store(made, [key(f"bytes{dtype}")], [was])
    assert load(made, [key(f"bytes{dtype}")], [came]) == [True]
    assert torch.equal(came.tensor.view(torch.uint8), was.tensor.view(torch.uint8))
    made.close()


def test_keys_tell_chunks_apart(daemon):
    made = adapter(daemon, bits="exact")
    shape = (LAYERS, 64, HEADS * 2 * DIM)
    assert store(made, [key("one")], [chunk(shape)])
    others = [key("one", cache_salt="alice"), key("one", object_group_id=1), key("two")]
    assert look_up(made, [key("one"), *others]) == [True, False, False, False]
    coded = adapter(daemon, bits=4)
    assert look_up(coded, [key("one")]) == [False]
    made.close()
    coded.close()


def test_what_does_not_fit_is_a_miss(daemon):
    made = adapter(daemon, bits="exact")
    shape = (LAYERS, 64, HEADS * 2 * DIM)
    assert store(made, [key("fits")], [chunk(shape)])
    assert load(made, [key("fits")], [chunk((LAYERS, 32, HEADS * 2 * DIM), fill=False)]) == [False]
    assert load(made, [key("fits")], [chunk(shape, torch.float16, fill=False)]) == [False]
    odd = adapter(daemon, kv_heads=7)
    assert not store(odd, [key("odd")], [chunk(shape)])
    with pytest.raises(qkvd.InvalidArgument, match="kv_heads is 0"):
        adapter(daemon, kv_heads=0)
    made.close()
    odd.close()


@pytest.mark.parametrize("bits, error", [(8, 0.02), (4, 0.15), ("unsaid", 0.02)])
def test_coded_chunks(daemon, bits, error):
    made = adapter(daemon, **({} if bits == "unsaid" else {"bits": bits}))
    shape = (LAYERS, TOKENS, HEADS * 2 * DIM)
    was, came = chunk(shape), chunk(shape, fill=False)
    assert store(made, [key(f"coded{bits}")], [was])
    assert load(made, [key(f"coded{bits}")], [came]) == [True]
    difference = float((came.tensor - was.tensor).norm() / was.tensor.norm())
    print(f"\n{bits} bits: a relative error of {difference:.4f}")
    assert 0 < difference < error
    made.close()


def test_mutual_tls(tmp_path):
    """The server's adapter by a certificate of its own; without it nothing is kept, and nothing raised."""
    shape = (LAYERS, TOKENS, HEADS * 2 * DIM)
    was, came = chunk(shape), chunk(shape, fill=False)
    with Secured(tmp_path) as daemon:
        made = adapter(daemon, bits="exact", **daemon.settings)
        assert store(made, [key("secret")], [was])
        assert load(made, [key("secret")], [came]) == [True] and torch.equal(came.tensor, was.tensor)
        assert made.report_status()["is_healthy"]
        stranger = adapter(daemon, target=daemon.tcp, timeout=5.0)
        assert not store(stranger, [key("other")], [was])
        made.close()
        stranger.close()


@pytest.mark.parametrize("kind", ["rows", "bytes"])
def test_a_daemon_killed_in_the_middle_of_a_load(kind):
    """What has not come whole is a miss."""
    settings = {"opaque": kind == "bytes", "bits": "exact"}
    shape = (LAYERS, TOKENS, HEADS * 2 * DIM)
    keys = [key(f"killed{place}") for place in range(4)]
    was = [chunk(shape) for _ in keys]
    with Daemon() as daemon, Proxy(daemon.target) as proxy:
        made = adapter(daemon, target=proxy.target, **settings)
        assert store(made, keys, was)
        proxy.after(1_000_000, daemon.kill)  # of 3.1 million
        came = [chunk(shape, fill=False) for _ in keys]
        loaded = load(made, keys, came)
        wait_for(lambda: daemon.process.poll() is not None, "the load has ended before it was broken off")
        assert not all(loaded)
        for good, one, other in zip(loaded, came, was, strict=True):
            assert not good or torch.equal(one.tensor, other.tensor)
        daemon.start()
        wait_for(lambda: store(made, keys, was), "the daemon is not used again")
        assert load(made, keys, came) == [True] * 4
        made.close()


def test_a_daemon_that_dies_and_comes_back(daemon):
    made = adapter(daemon, bits=8, durability="sync")
    shape = (LAYERS, TOKENS, HEADS * 2 * DIM)
    keys, was = [key("dies")], chunk(shape)
    assert store(made, keys, [was])
    daemon.kill()
    assert not made.report_status()["is_healthy"]
    assert look_up(made, keys) == [False]
    assert load(made, keys, [chunk(shape, fill=False)]) == [False]
    assert not store(made, [key("later")], [was])
    daemon.start()
    wait_for(lambda: look_up(made, keys) == [True], "the daemon is not used again")
    came = chunk(shape, fill=False)
    assert load(made, keys, [came]) == [True]
    torch.testing.assert_close(came.tensor, was.tensor, atol=0.1, rtol=0)
    assert store(made, [key("later")], [was])
    made.close()
