#!/usr/bin/python3
"""What attacks cost others: a table of a tenant's p50 and p99, the time of health checks and resident memory, quiet and under
each attack of attackers.py; exit 1 where a bound is not kept."""

import argparse
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"), help="a finished build")
    parser.add_argument("--seconds", type=float, default=5, help="of each look")
    parser.add_argument("--only", action="append", help="an attack, by name; may be given several times")
    parser.add_argument("--list", action="store_true", help="print the attacks' names")
    return parser.parse_args()


def main():
    options = arguments()
    folders = [os.path.join(ROOT, "tests/e2e"), os.path.join(options.build, "tests/e2e/stubs")]
    sys.path[:0] = folders
    os.environ["QKV_BIN_DIR"] = os.path.join(options.build, "bin")
    os.environ["PYTHONPATH"] = ":".join(folders)
    from attackers import ATTACKS
    from daemon import Daemon
    from victim import MIB, Attacker, Victim, percentile

    if options.list:
        print("\n".join(ATTACKS))
        return 0
    print("| attack | a tenant's p50, p99, quiet | under attack | health check, p99 | longest | resident memory |")
    print("|---|---|---|---|---|---|")
    missed = []
    for name in options.only or ATTACKS:
        with Daemon() as daemon:
            victim = Victim(daemon)
            victim.look(1)
            quiet = victim.look(options.seconds)
            with Attacker(daemon, name):
                victim.look(2)  # until it is under way
                seen = victim.look(options.seconds)
            before, after = percentile(quiet.decodes, .99), percentile(seen.decodes, .99)
            medians = percentile(quiet.decodes, .5), percentile(seen.decodes, .5)
            print(f"| {name} | {medians[0] * 1e3:.2f}, {before * 1e3:.2f} ms | "
                  f"{medians[1] * 1e3:.2f}, {after * 1e3:.2f} ms, p99 {after / before:.1f} times | "
                  f"{percentile(seen.checks, .99) * 1e3:.1f} ms | {max(seen.checks) * 1e3:.1f} ms | "
                  f"{quiet.rss / MIB:.0f}, {seen.rss / MIB:.0f} MiB |", flush=True)
            missed += [f"{name}: p99 {after / before:.1f} times that of quiet"] if after > 2 * before else []
            missed += [f"{name}: a health check took {max(seen.checks) * 1e3:.0f} ms"] if max(seen.checks) > 0.1 else []
            missed += [f"{name}: {seen.rss / MIB:.0f} MiB"] if seen.rss > quiet.rss + 512 * MIB else []
            missed += [f"{name}: {len(seen.failures)} calls failed: {seen.failures[0].details()}"] if seen.failures else []
    for line in missed:
        print("missed:", line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
