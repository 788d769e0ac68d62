#!/usr/bin/python3
"""What a tenant that decodes has of its share while another one floods the daemon with appends and attends: its attends a
second, alone and then. Both have the same weight, so that its share is a half of what it gets alone. The other tenant is stopped
and goes on in turns, as what other processes leave of the machine varies; "of processor time" is the same by second of the
daemon's processor time, and each line says who has the processors meanwhile: the daemon, this client and the other one."""

import argparse
import contextlib
import functools
import os
import signal
import statistics
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
STREAMS = 8  # enough that a job of the tenant waits all the time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"), help="a finished build")
    parser.add_argument("--rounds", type=int, default=5, help="daemons, one after the other")
    parser.add_argument("--turns", type=int, default=4, help="looks of each, alone and with the other tenant")
    parser.add_argument("--seconds", type=float, default=2, help="of each look")
    parser.add_argument("--apart", action="store_true", help="the daemon has one half of the processors, the clients the other: "
                        "as on machines of their own, what the other tenant's client takes of a processor is not the daemon's")
    return parser.parse_args()


def main():
    options = arguments()
    folders = [os.path.join(ROOT, "tests/e2e"), os.path.join(options.build, "tests/e2e/stubs")]
    sys.path[:0] = folders
    os.environ["QKV_BIN_DIR"] = os.path.join(options.build, "bin")
    os.environ["PYTHONPATH"] = ":".join(folders)
    import numpy as np

    from daemon import Daemon
    from kv import TIMEOUT, Cache, Tenant
    from qkv.v1 import admin_pb2, admin_pb2_grpc
    from qkv.v1 import kv_cache_pb2 as kv

    @contextlib.contextmanager
    def flood(address):
        """attackers.py's, at the same priority as the other clients."""
        code = "import attackers, sys; attackers.appends_and_attends(sys.argv[1])"
        path = os.pathsep.join([os.path.dirname(os.path.abspath(__file__)), *folders])
        process = subprocess.Popen([sys.executable, "-c", code, address], env={**os.environ, "PYTHONPATH": path})
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    class Decoder(threading.Thread):
        """Attends one after the other over 8192 tokens of 8 KV heads, and counts them."""

        def __init__(self, daemon, number):
            super().__init__(daemon=True)
            self.cache = Cache(Tenant(daemon.stub(daemon.tcp), "decoder"), f"d{number}", layers=1, kv_heads=8, q_heads=32,
                               key_dim=128, value_dim=128)
            for position in range(0, 8192, 1024):
                self.cache.append(position, *self.cache.rows(1024))
            self.request = kv.AttendRequest(items=[self.cache.item(8191, q=self.cache.queries(1), in_floats=False)])
            self.count, self.ends = 0, False

        def run(self):
            while not self.ends:
                self.cache.stub.Attend(self.request, timeout=TIMEOUT)
                self.count += 1

    shares, of_time = [], []
    processors = sorted(os.sched_getaffinity(0))
    half = len(processors) // 2
    if options.apart and half == 0:
        sys.exit("shares.py: --apart needs two processors")
    if options.apart:
        os.sched_setaffinity(0, processors[half:])  # later threads and processes, too
    before = functools.partial(os.sched_setaffinity, 0, processors[:half]) if options.apart else None
    for _ in range(options.rounds):
        with Daemon("--memory-budget", "4GiB", "--calibrate-tokens", "0", before=before) as daemon:
            decoders = [Decoder(daemon, number) for number in range(STREAMS)]
            for decoder in decoders:
                decoder.start()
            admin = admin_pb2_grpc.AdminStub(daemon.channel())

            def processor_seconds(pid):
                with open(f"/proc/{pid}/stat") as stat:
                    ticks = stat.read().rsplit(") ", 1)[1].split()[11:13]
                return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

            def counts(flooding):
                """Attends, rows that the other tenant has appended, seconds of the daemon's processor time, of the clock, and of
                this client's and the other one's processor time."""
                found = admin.GetQuota(admin_pb2.GetQuotaRequest(tenant="greedy"), timeout=TIMEOUT).tenants
                return np.array([sum(decoder.count for decoder in decoders), sum(one.usage.rows for one in found),
                                 processor_seconds(daemon.process.pid), time.monotonic(), processor_seconds(os.getpid()),
                                 processor_seconds(flooding.pid)])

            def look(flooding, to):
                flooding.send_signal(signal.SIGCONT if to is both else signal.SIGSTOP)
                time.sleep(0.5)  # until what it has sent is done
                before = counts(flooding)
                time.sleep(options.seconds)
                to += counts(flooding) - before

            alone, both = np.zeros(6), np.zeros(6)
            with flood(daemon.tcp) as flooding:
                time.sleep(3)  # until it is under way
                for _ in range(options.turns):
                    look(flooding, alone)
                    look(flooding, both)
            for decoder in decoders:
                decoder.ends = True
            for decoder in decoders:
                decoder.join()
        shares.append(2 * (both[0] / both[3]) / (alone[0] / alone[3]))
        of_time.append(2 * (both[0] / both[2]) / (alone[0] / alone[2]))
        print(f"{alone[0] / alone[3]:.0f} attends a second alone, {both[0] / both[3]:.0f} while the other tenant appends "
              f"{both[1] / both[3]:.0f} rows a second: {shares[-1]:.2f} of its share, {of_time[-1]:.2f} of processor time; processors "
              + ", then ".join("daemon {:.2f}, this client {:.2f}, the other {:.2f}".format(*look[[2, 4, 5]] / look[3])
                               for look in (alone, both)),
              flush=True)
    print(f"median {statistics.median(shares):.2f}, lowest {min(shares):.2f}; of processor time median "
          f"{statistics.median(of_time):.2f}, lowest {min(of_time):.2f}")


if __name__ == "__main__":
    main()
