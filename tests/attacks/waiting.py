#!/usr/bin/python3
"""How long a tenant waits while 32 appends of another one wait for that one's quota, of memory or of the SSD: a table of the
times in which it opens a session, reads rows that are on the SSD alone, and appends rows that are durable when the call is
answered, quiet and attacked. Each round is a daemon of its own; figures are of all rounds together."""

import argparse
import os
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SESSIONS, TOKENS = 16, 2048  # of which host_bytes holds a few


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"), help="a finished build")
    parser.add_argument("--seconds", type=float, default=15, help="of each look")
    parser.add_argument("--rounds", type=int, default=2, help="daemons, one after the other")
    return parser.parse_args()


def main():
    options = arguments()
    folders = [os.path.join(ROOT, "tests/e2e"), os.path.join(options.build, "tests/e2e/stubs")]
    sys.path[:0] = folders
    os.environ["QKV_BIN_DIR"] = os.path.join(options.build, "bin")
    os.environ["PYTHONPATH"] = ":".join(folders)
    from attackers import WAITS
    from daemon import Daemon, wait_for
    from kv import FP16, TIMEOUT, Cache, Tenant
    from qkv.v1 import kv_cache_pb2 as kv
    from victim import Attacker, percentile

    class Reader:
        """Has 16 sessions, of which 3 are in memory."""

        def __init__(self, daemon):
            stub, shape = Tenant(daemon.stub(daemon.tcp), "victim"), {"layers": 1, "kv_heads": 8, "q_heads": 8, "recent_window": 0,
                                                                      "key_dim": 64, "value_dim": 64, "dtype": FP16}
            self.sessions = [Cache(stub, f"s{i}", seed=i, **shape) for i in range(SESSIONS)]
            for session in self.sessions:
                for position in range(0, TOKENS, 256):
                    session.append(position, *session.rows(256), dtype=FP16)
            self.durable = Cache(stub, "durable", durability=kv.DURABILITY_SYNC, **shape)
            self.rows, self.position, self.count = self.durable.rows(8), 0, 0

        def look(self, seconds, times):
            def timed(what, call):
                begin = time.monotonic()
                call()
                times.setdefault(what, []).append(time.monotonic() - begin)

            until = time.monotonic() + seconds
            while time.monotonic() < until:
                session, stub, new = self.sessions[self.count % SESSIONS], self.durable.stub, f"new-{self.count}"
                timed("opens a session",
                      lambda: stub.OpenSession(kv.OpenSessionRequest(session=new, model=session.model.name), timeout=TIMEOUT))
                timed("reads cold rows",
                      lambda: list(stub.Fetch(kv.FetchRequest(session=session.name, dtype=FP16), timeout=TIMEOUT)))
                timed("appends durably", lambda: self.durable.append(self.position, *self.rows, dtype=FP16))
                stub.CloseSession(kv.CloseSessionRequest(session=new), timeout=TIMEOUT)
                self.position += 8
                self.count += 1
                time.sleep(0.01)

    def show(times):
        return ", ".join(f"{value * 1e3:.1f}" for value in (percentile(times, .5), percentile(times, .99), max(times)))

    print("| the other tenant's appends wait for | call | p50, p99 and longest quiet, ms | attacked |")
    print("|---|---|---|---|")
    for name, (quota, _) in WAITS.items():
        quiet, attacked = {}, {}
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                quotas = os.path.join(folder, "quotas")
                with open(quotas, "w", encoding="ascii") as file:
                    file.write(f"greedy {name}={quota}\nvictim host_bytes=3MiB\n")
                with Daemon("--quota-file", quotas, "--data-dir", os.path.join(folder, "data"), "--calibrate-tokens", "0") as daemon:
                    reader = Reader(daemon)
                    reader.look(1, {})
                    reader.look(options.seconds, quiet)
                    with Attacker(daemon, name):
                        wait_for(lambda: daemon.metric("qkvd_queue_jobs") >= 16, "the appends do not wait")
                        reader.look(options.seconds, attacked)
                    daemon.kill()  # what has waited for the SSD would wait for it again
        for call, times in quiet.items():
            print(f"| `{name}` | {call} | {show(times)} | {show(attacked[call])} |", flush=True)


if __name__ == "__main__":
    main()
