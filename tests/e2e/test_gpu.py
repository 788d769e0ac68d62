"""The daemon with a GPU: a fake CUDA driver whose kernels an emulator runs. Every answer has the bits of a daemon without
one, whatever becomes of the session or of the driver."""

import copy
import json
import os
import subprocess
import time
import urllib.request

import numpy as np
import pytest

from daemon import BIN_DIR, Daemon, binary, clean_environment, wait_for
from kv import Cache, TIMEOUT
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2, tensor_pb2

BUILD = os.path.dirname(BIN_DIR)
FAKE = os.path.join(BUILD, "tests", "gpu", "fake")
USELESS = os.path.join(BUILD, "tests", "storage", "stub_cuda")  # a driver without functions
ALIKE = ("--calibrate-tokens", "0", "--ema-every", "0", "--threads", "2")
PAGE = 64
# An attend of 40 pages at 2 bits is more than what a thread that must not wait computes itself, with the CPU.
SHAPE = {"layers": 1, "kv_heads": 2, "q_heads": 4, "key_dim": 128, "value_dim": 128, "bits_k": 4, "bits_v": 3,
         "recent_window": 0}


def kernels_in(folder):
    """A file for --gpu-kernels."""
    path = folder / "kernels"
    path.write_text("the fake driver has its own")
    return str(path)


@pytest.fixture
def kernels(tmp_path):
    return kernels_in(tmp_path)


def with_gpu(kernels, *arguments, library=FAKE, memory="64MiB", **environment):
    return Daemon(*ALIKE, "--gpu-memory", memory, "--gpu-kernels", kernels, *arguments,
                  environment={"LD_LIBRARY_PATH": library, **environment})


def gpu(daemon, name):
    return daemon.metric(f"qkvd_gpu_{name}")


def places(daemon, session, tokens):
    """How many tokens of layer 0 lie where, as the admin page shows it."""
    address = messages(daemon, "serving HTTP")[0]["address"]
    path = f"/api/map?session={session}&layer=0&buckets=1"
    with urllib.request.urlopen(f"http://{address}{path}", timeout=TIMEOUT) as answer:
        shown = json.load(answer)
    assert shown["tokens"] == tokens
    return {name: round(part[0] * tokens) for name, part in zip(shown["place_names"], shown["places"])}


def messages(daemon, text):
    return [line for line in daemon.log_lines() if line["message"] == text]


def qkvctl_status(daemon, *options):
    return subprocess.run([binary("qkvctl"), "status", "--target", daemon.target, *options], check=True, text=True,
                          stdout=subprocess.PIPE, env=clean_environment()).stdout


class Pair:
    """A session of both daemons that goes through the same."""

    def __init__(self, daemons, name, **shape):
        self.name = name
        self.caches = [Cache(daemon.stub(), name, seed=7, **{**SHAPE, **shape}) for daemon in daemons]
        self.length = 0

    def append(self, tokens):
        k, v = self.caches[0].rows(tokens)
        for cache in self.caches:
            cache.append(self.length, k, v)
        self.length += tokens

    def fork(self, name):
        made = copy.copy(self)
        made.name = name
        made.caches = [copy.copy(cache) for cache in self.caches]
        for cache in made.caches:
            cache.stub.Fork(kv.ForkRequest(session=self.name, fork=name, position=self.length), timeout=TIMEOUT)
            cache.name = name
        return made

    def truncate(self, position):
        self.call("Truncate", kv.TruncateRequest(session=self.name, position=position))
        self.length = position

    def call(self, method, request):
        return [getattr(cache.stub, method)(request, timeout=TIMEOUT) for cache in self.caches]

    def attend(self, queries=1, **options):
        q = self.caches[0].queries(queries)
        with_it, without = (cache.attend(self.length - queries, q, in_floats=False,
                                         options=kv.AttendOptions(**options)) for cache in self.caches)
        assert np.array_equal(with_it[0], without[0]) and np.array_equal(with_it[1], without[1])


def inner_range(daemons, name="s", pages=40):
    """A session with a range of some pages that it appends nothing to any more, and the fork that made it so."""
    session = Pair(daemons, name)
    session.append(pages * PAGE)
    fork = session.fork(f"{name}-fork")
    session.append(70)
    return session, fork


def until_resident(daemon, session, ranges=1):
    def attended():
        session.attend()
        return gpu(daemon, "ranges") >= ranges
    wait_for(attended, "a range does not become resident")


# ---- One that works ----

def test_the_same_bits(kernels, tmp_path):
    with with_gpu(kernels, "--data-dir", str(tmp_path / "a")) as daemon, \
            Daemon(*ALIKE, "--data-dir", str(tmp_path / "b")) as other:
        (line,) = messages(daemon, "a GPU is used")
        assert line["gpu"] == "fake 0" and line["memory"] == 64 << 20, line
        assert messages(other, "a GPU is used") == [] and gpu(other, "down") == 0
        session, fork = inner_range((daemon, other))
        until_resident(daemon, session)
        hits, calls = gpu(daemon, "hits_total"), gpu(daemon, "calls_total")
        for queries in (1, 3, 8):
            session.attend(queries)
        session.attend(2, sliding_window=2000)
        session.attend(2, range=tensor_pb2.TokenRange(begin=10, end=2000))
        session.attend(1, soft_cap=20)
        session.attend(1, range=tensor_pb2.TokenRange(begin=0, end=150))  # too little to wait for
        assert gpu(daemon, "hits_total") == hits + 6 and gpu(daemon, "calls_total") == calls + 6
        assert "GPU" in qkvctl_status(daemon) and "1 ranges resident" in qkvctl_status(daemon)
        assert "GPU" not in qkvctl_status(other)
        # The fork has the range, too; what it appends is its own.
        fork.append(100)
        fork.attend()
        assert gpu(daemon, "ranges") == 1 and gpu(daemon, "hits_total") == hits + 7
        # Other tiers: the session's own images.
        demote = kv.DemoteRequest(session="s", bits=2, even=True)
        wait_for(lambda: min(answer.pages for answer in session.call("Demote", demote)) == 0, "pages stay as they are")
        session.attend()
        until_resident(daemon, session, 2)
        fork.attend()
        # Cut within the range, and appended again.
        session.truncate(39 * PAGE)
        session.append(70)
        session.attend(2)
        # Out of memory, and back.
        fork.call("CloseSession", kv.CloseSessionRequest(session=fork.name, keep=True))
        wait_for(lambda: fork.caches[0].info().tokens_cold > 0, "nothing leaves memory")
        fork.attend()
        until_resident(daemon, fork)
        # The end.
        for one in (session, fork):
            one.call("CloseSession", kv.CloseSessionRequest(session=one.name))
        wait_for(lambda: gpu(daemon, "ranges") == 0, "copies of closed sessions stay")
        assert gpu(daemon, "failures_total") == 0


def test_a_tenants_quota(kernels, tmp_path):
    """gpu_bytes keeps a tenant's ranges off the GPU, after kill -9, too, until there is more of it."""
    def qkvctl_quota(*words):
        command = [binary("qkvctl"), "quota", *words, "--json", "--target", daemon.target]
        return json.loads(subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, env=clean_environment()).stdout)

    data = ("--data-dir", str(tmp_path / "data"), "--admin-listen", "127.0.0.1:0")
    with with_gpu(kernels, *data) as daemon:
        assert qkvctl_quota("set", "default", "gpu_bytes=1")["quota"]["gpu_bytes"] == 1
        daemon.kill()
    with with_gpu(kernels, *data) as daemon, Daemon(*ALIKE) as other:
        session, _ = inner_range((daemon, other))
        for _ in range(30):
            session.attend()
        assert gpu(daemon, "ranges") == 0 and gpu(daemon, "less_attended_total") > 0
        qkvctl_quota("set", "default", "gpu_bytes=32MiB")
        until_resident(daemon, session)
        used = qkvctl_quota("show", "default")["usage"]["gpu_bytes"]
        address = messages(daemon, "serving HTTP")[0]["address"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT) as answer:
            assert f'qkvd_tenant_quota_used{{tenant="default",resource="gpu_bytes"}} {used}\n' in answer.read().decode()
        assert 0 < used <= gpu(daemon, "bytes")


def test_several_sessions_in_a_batch(kernels):
    """Requests that share a range, and one that does not, in one call."""
    with with_gpu(kernels) as daemon, Daemon(*ALIKE) as other:
        session, fork = inner_range((daemon, other))
        fork.append(10)
        alone, _ = inner_range((daemon, other), "alone", 30)
        for one in (session, alone):
            one.attend()
        until_resident(daemon, session)
        until_resident(daemon, alone, 2)
        q = session.caches[0].queries(1)
        answers = []
        for cache in session.caches:
            items = [kv.Item(session=one.name, position=one.length - 1, q=cache.item(q=q, in_floats=False).q)
                     for one in (session, fork, alone)]
            answers.append(cache.stub.Attend(kv.AttendRequest(items=items), timeout=TIMEOUT))
        for first, second in zip(answers[0].results, answers[1].results):
            assert first.status.code == 0 and first.out.data == second.out.data and first.lse.data == second.lse.data


def test_a_model_that_is_calibrated_from_its_traffic(kernels):
    """As by default: what comes after the first tokens is of a calibrated code, and so are answers of the GPU."""
    with Daemon("--threads", "2", "--ema-every", "0", "--calibrate-tokens", "1024", "--gpu-memory", "64MiB",
                "--gpu-kernels", kernels, "--admin-listen", "127.0.0.1:0",
                environment={"LD_LIBRARY_PATH": FAKE}) as daemon:
        cache = Cache(daemon.stub(), "s", layers=1, kv_heads=2, q_heads=4, key_dim=128, value_dim=128, recent_window=0,
                      rope=model_pb2.Rope(theta=10000))
        fall = np.exp(-np.arange(128) / 24).astype(np.float32)

        def append(position, tokens):
            cache.append(position, *(rows * fall + 0.3 for rows in cache.rows(tokens)))

        def attend(q, **options):
            return cache.attend(4 * 1024 - 1, q, in_floats=False, options=kv.AttendOptions(**options))

        append(0, 1024)
        wait_for(lambda: daemon.metric("qkvd_calibrations_total") == 1, "no calibration is made")
        append(1024, 3 * 1024)
        cache.stub.Fork(kv.ForkRequest(session="s", fork="other", position=4 * 1024), timeout=TIMEOUT)
        append(4 * 1024, 70)  # in a range of its own: what comes before does not grow any more
        append(4 * 1024 + 70, 70)
        assert cache.info().calibration != 0
        asked = [(cache.queries(1), {}), (cache.queries(1), {"sliding_window": 2500}),
                 (cache.queries(1), {"precision": kv.AttendOptions.PRECISION_INT16})]
        by_cpu = [attend(q, **options) for q, options in asked]

        def resident():
            attend(asked[0][0])
            return gpu(daemon, "ranges") >= 2

        wait_for(resident, "the calibrated range does not become resident")
        hits, calls = gpu(daemon, "hits_total"), gpu(daemon, "calls_total")
        for (q, options), (out, lse) in zip(asked, by_cpu):
            again = attend(q, **options)
            assert np.array_equal(again[0], out) and np.array_equal(again[1], lse)
        assert gpu(daemon, "hits_total") >= hits + 5 and gpu(daemon, "calls_total") >= calls + 5
        assert gpu(daemon, "failures_total") == 0
        shown = places(daemon, "s", 4 * 1024 + 140)
        assert shown["gpu"] == 4 * 1024 and shown["exact"] + shown["memory"] + shown["shared"] == 140, shown


def bench(*arguments, library):
    return subprocess.run([binary("qkv-bench"), "attend", "--tokens", "256", "--kv-heads", "1", "--q-heads", "2", "--alone",
                           "--repeats", "1", "--calibrated", "--frame", "attend", "--json", *arguments], text=True,
                          capture_output=True, env={**clean_environment(), "LD_LIBRARY_PATH": library}, check=False)


def test_the_benchmark_attends_on_it():
    without, driverless = bench(library=""), bench("--device", "gpu", library=USELESS)
    assert without.returncode == 0 and "gpu_ranges" not in without.stdout
    assert driverless.returncode == 1 and "--device gpu: " in driverless.stderr
    if "built without kernels" in driverless.stderr:
        pytest.skip(driverless.stderr)
    with_it = bench("--device", "gpu", library=FAKE)
    assert with_it.returncode == 0, with_it.stderr
    shown, expected = json.loads(with_it.stdout), json.loads(without.stdout)
    assert shown["gpu"] == "fake 0" and shown["gpu_ranges"] > 0
    assert shown["rel_err"] == expected["rel_err"] and shown["code_err"] == expected["code_err"]


# ---- One that is full ----

def test_memory_that_fills(kernels):
    """Ranges of 64 pages, more than fit: of those that get least attention one leaves for one that gets more."""
    tokens, ranges = 64 * PAGE, 32
    with with_gpu(kernels, memory="16MiB") as daemon, Daemon(*ALIKE) as other:
        session = Pair((daemon, other), "s", key_dim=64, value_dim=64, bits_v=4)
        for _ in range(ranges):
            session.append(tokens)
        session.append(PAGE)

        def of(index):
            return tensor_pb2.TokenRange(begin=index * tokens, end=(index + 1) * tokens)

        def bring(index):
            def uploaded():
                if gpu(daemon, "uploads_total") > before:
                    return True
                session.attend(range=of(index))
                return False
            before = gpu(daemon, "uploads_total")
            wait_for(uploaded, "a range is not uploaded")

        for index in range(ranges):
            bring(index)
        assert gpu(daemon, "evictions_total") > 0 and gpu(daemon, "bytes") <= 16 << 20
        assert 15 < gpu(daemon, "ranges") < ranges
        hits = gpu(daemon, "hits_total")
        session.attend(range=of(ranges - 1))
        assert gpu(daemon, "hits_total") == hits + 1
        assert gpu(daemon, "failures_total") == 0

        def refused():
            """Once, as all of the session was attended and one is less than the least."""
            session.attend(range=of(0))
            return gpu(daemon, "less_attended_total") > 0
        wait_for(refused, "all ranges are uploaded")
        status = json.loads(qkvctl_status(daemon, "--json"))["gpus"][0]
        assert status["less_attended"] == gpu(daemon, "less_attended_total")
        assert f"{status['less_attended']} attends of ranges that get less attention" in qkvctl_status(daemon)


# ---- One that fails ----

def cycle(daemons):
    session, fork = inner_range(daemons)
    fork.append(10)
    for _ in range(12):
        session.attend()
        fork.attend()
        time.sleep(0.01)


FAULTS = ["cuInit:1:999", "cuDeviceGetCount:1:100", "cuModuleLoadData:1:218", "cuMemAlloc:1:2", "cuMemHostAlloc:3:2",
          "cuMemcpyHtoDAsync:2:719", "cuLaunchKernel:1:719", "cuLaunchKernel:4:700", "cuEventRecord:3:214",
          "cuEventQuery:5:719", "cuEventQuery:8:-1", "cuCtxSetCurrent:9:201"]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(kernels, fault):
    """The nth call of a function of the driver fails, or an event never comes: nobody notices but the log."""
    with with_gpu(kernels, FAKE_CUDA_FAIL=fault) as daemon, Daemon(*ALIKE) as other:
        cycle((daemon, other))
        wait_for(lambda: gpu(daemon, "down") == 1, "the fault does not show")
        assert messages(daemon, "no GPU is used") + messages(daemon, "a GPU is not used, it is tried again later") + \
            messages(daemon, "a GPU is not used any more"), daemon.log_text()
        assert daemon.metric("qkvd_calls_failed_total") == daemon.metric("qkvd_calls_unavailable_total") == 0


def test_it_is_tried_again(kernels):
    with with_gpu(kernels, "--admin-listen", "127.0.0.1:0", FAKE_CUDA_FAIL="cuLaunchKernel:2:719") as daemon, \
            Daemon(*ALIKE) as other:
        session, _ = inner_range((daemon, other))
        address = messages(daemon, "serving HTTP")[0]["address"]

        def ready():
            with urllib.request.urlopen(f"http://{address}/health/ready", timeout=TIMEOUT) as answer:
                return answer.read().decode()

        def fails():
            session.attend()
            return gpu(daemon, "down") == 1

        assert ready() == "ready\n"
        wait_for(fails, "it does not fail")
        assert gpu(daemon, "failures_total") == 1
        wait_for(lambda: gpu(daemon, "ranges") == 0, "its ranges stay")
        assert "GPU 0       is not used: cuLaunchKernel: FAKE_ERROR (719)" in qkvctl_status(daemon)
        wait_for(lambda: ready() == "ready, but a GPU is not used: the log says why\n", "readiness does not mention it")
        wait_for(lambda: gpu(daemon, "down") == 0, "it is not tried again")
        assert len(messages(daemon, "a GPU is used")) == 2
        until_resident(daemon, session)
        calls = gpu(daemon, "calls_total")
        session.attend()
        assert gpu(daemon, "calls_total") > calls and ready() == "ready\n"


# ---- Several ----

def labelled(daemon, address):
    """Metrics of each GPU: by name, then by GPU."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT) as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for line in lines:
        if line.startswith("qkvd_gpu_device_"):
            name, value = line.split()
            name, label = name.rstrip("}").split("{")
            found.setdefault(name.removeprefix("qkvd_gpu_device_"), {})[label.split('"')[1]] = float(value)
    return found


def test_several(kernels):
    """Sessions are spread over two GPUs; one that fails leaves the other at work, and comes back."""
    with with_gpu(kernels, "--admin-listen", "127.0.0.1:0", "--gpu-devices", "all",
                  FAKE_CUDA_FAIL="cuLaunchKernel:6:719:1") as daemon, Daemon(*ALIKE) as other:
        address = messages(daemon, "serving HTTP")[0]["address"]
        daemons = (daemon, other)
        sessions = [inner_range(daemons, f"of-{i}")[0] for i in range(4)]
        assert labelled(daemon, address)["sessions"] == {"0": 4, "1": 4}  # a fork is where its parent is

        def until(true, text):
            def step():
                for session in sessions:
                    session.attend()
                return true(labelled(daemon, address))
            wait_for(step, text)

        until(lambda m: m["calls_total"]["0"] > 0, "GPU 0 attends nothing")
        until(lambda m: m["failures_total"]["1"] == 1, "GPU 1 does not fail")
        before = labelled(daemon, address)
        assert before["failures_total"]["0"] == 0 and before["up"]["0"] == 1
        until(lambda m: m["calls_total"]["0"] > before["calls_total"]["0"], "GPU 0 stopped as well")
        shown = qkvctl_status(daemon)
        assert "GPU 0       fake 0: " in shown, shown
        assert "GPU 1       fake 1: " in shown or "GPU 1       is not used" in shown, shown
        until(lambda m: m["up"]["1"] == 1 and m["calls_total"]["1"] > before["calls_total"]["1"], "GPU 1 stays away")
        with urllib.request.urlopen(f"http://{address}/api/status", timeout=TIMEOUT) as answer:
            gpus = json.load(answer)["gpus"]
        assert [(g["device"], g["name"], g["up"], g["sessions"]) for g in gpus] == \
            [("0", "fake 0", True, 4), ("1", "fake 1", True, 4)]


# ---- None ----

def test_no_driver(kernels):
    with with_gpu(kernels, library=USELESS) as daemon, Daemon(*ALIKE) as other:
        (line,) = messages(daemon, "no GPU is used")
        assert line["level"] == "warn" and "CUDA" in line["reason"], line
        cycle((daemon, other))
        assert gpu(daemon, "down") == 1 and gpu(daemon, "misses_total") == 0
        assert "none is used" in qkvctl_status(daemon)


@pytest.mark.parametrize("arguments, text", [
    (("--gpu-memory", "1MiB"), "--gpu-memory is 1048576 bytes, allowed are 0 and 16777216 bytes or more"),
    (("--gpu-memory", "64MiB", "--gpu-devices", "0", "--gpu-devices", "all"),
     "--gpu-devices has `all` and other names"),
    (("--gpu-memory", "64MiB", "--gpu-devices", "first"), '--gpu-devices: "first" is neither a number, nor `all`, nor a UUID'),
    (("--gpu-memory", "64MiB", "--gpu-kernels", "/nowhere/k"), "--gpu-kernels: /nowhere/k: No such file"),
])
def test_refused_options(arguments, text):
    run = subprocess.run([binary("qkvd"), "--listen", "127.0.0.1:0", *arguments], capture_output=True, text=True,
                         env=clean_environment(), timeout=60)
    assert run.returncode != 0 and text in run.stderr, run.stderr
