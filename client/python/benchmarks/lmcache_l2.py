"""`lmcache bench l2` with qkvd, Redis and files as the second level, in turn. Run with the interpreter that has LMCache.

    QKV_BIN_DIR=build/release/bin build/python/lmcache/bin/python client/python/benchmarks/lmcache_l2.py --runs 3

Each run has servers of its own, whose memory is full of other objects that they may drop. Without redis-server in PATH it
is left out. Prints the medians over the runs of each run's median round, in ms, with the lowest and the highest.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tests"))

from daemon import Daemon, clean_environment, wait_for

import qkvd

OPERATIONS = ["Store", "Lookup", "Load"]
OTHER = os.urandom(1 << 20)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def measured(spec, keys, size_kb, rounds):
    """Median ms of each operation, one call for all keys."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [
            os.path.join(os.path.dirname(sys.executable), "lmcache"), "bench", "l2", "--l2-adapter", json.dumps(spec),
            "--num-keys", str(keys), "--data-size-kb", str(size_kb), "--rounds", str(rounds), "--format", "json",
            "--output", out.name,
        ]  # fmt: skip
        environment = clean_environment(LMCACHE_TRACK_USAGE="false")
        made = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if made.returncode:
            sys.exit(made.stdout + made.stderr)
        operations = [one for name, one in json.load(out)["metrics"].items() if name.startswith("op_")]
    return {one["operation"]: one["duration_p50_ms"] for one in operations}


@contextlib.contextmanager
def qkvd_full(megabytes):
    """The adapter for a daemon whose memory other objects fill, as that of a cache in use is."""
    with Daemon("--memory-budget", f"{megabytes}MB", "--limit-objects", "100000") as daemon:
        with qkvd.Client(daemon.target) as client:
            client.put_objects(((f"other/{i}", OTHER) for i in range(megabytes)), retention="evict")
        plugin = {"type": "plugin", "module_path": "qkvd.lmcache", "class_name": "QkvdL2Adapter"}
        yield plugin | {"adapter_params": {"target": daemon.target}}


@contextlib.contextmanager
def redis_full(megabytes):
    """The same for Redis."""
    port = free_port()
    limits = ["--maxmemory", f"{megabytes}mb", "--maxmemory-policy", "allkeys-lru", "--save", "", "--appendonly", "no"]
    command = ["setpriv", "--pdeathsig", "KILL", "redis-server", "--port", str(port), *limits]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as redis:
        wait_for(lambda: answers(port), "Redis does not answer")
        with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rb") as lines:
            for i in range(megabytes):
                name = f"other/{i}".encode()
                connection.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n" % (len(name), name, len(OTHER), OTHER))
                assert lines.readline() == b"+OK\r\n"
        yield {"type": "resp", "host": "127.0.0.1", "port": port}
        redis.kill()


@contextlib.contextmanager
def files(megabytes):
    """Files, of which none is there before."""
    with tempfile.TemporaryDirectory() as folder:
        yield {"type": "fs", "base_path": folder}


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("keys", 32), ("size-kb", 1024), ("rounds", 8), ("runs", 3)):
        options.add_argument(f"--{name}", type=int, default=default)
    given = options.parse_args()
    megabytes = 2 * given.keys * given.size_kb * (given.rounds + 1) // 1024
    kinds = {"qkvd": qkvd_full, "Redis": redis_full, "files": files}
    if not shutil.which("redis-server"):
        del kinds["Redis"]
    times = {what: [] for what in kinds}
    for _ in range(given.runs):
        for what, kind in kinds.items():
            with kind(megabytes) as spec:
                times[what].append(measured(spec, given.keys, given.size_kb, given.rounds))
    print(f"{given.keys} keys of {given.size_kb} KiB, ms | " + " | ".join(OPERATIONS))
    for what, runs in times.items():
        of_each = [[run[name] for run in runs] for name in OPERATIONS]
        print(f"{what} | " + " | ".join(f"{statistics.median(ms):.3g} ({min(ms):.3g} to {max(ms):.3g})" for ms in of_each))


if __name__ == "__main__":
    main()
