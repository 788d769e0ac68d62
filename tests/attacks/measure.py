#!/usr/bin/python3
"""What attacks cost others: a table of a tenant's p50 and p99, the time of health checks and resident memory, quiet and under
each attack of attackers.py; exit 1 where a bound is not kept. Quiet looks and attacks take turns: figures are medians of the
rounds, and the spread of the quiet p99 says how much the machine varies by itself. "Elsewhere" is a control: the same attack on
another daemon of this machine, which takes processor time from the tenant and nothing else."""

import argparse
import functools
import os
import statistics
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"), help="a finished build")
    parser.add_argument("--seconds", type=float, default=5, help="of each look")
    parser.add_argument("--rounds", type=int, default=3, help="looks of each kind, quiet and under attack")
    parser.add_argument("--only", action="append", help="an attack, by name; may be given several times")
    parser.add_argument("--list", action="store_true", help="print the attacks' names")
    parser.add_argument("--apart", action="store_true", help="as with machines of their own: the daemons have one half of the "
                        "processors, the clients the other, which the tenant's client gets at once when it wants it, by real-time "
                        "priority (CAP_SYS_NICE)")
    return parser.parse_args()


def prioritize(policy):
    """All threads of this process."""
    for task in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(task), policy, os.sched_param(os.sched_get_priority_min(policy)))


def main():
    options = arguments()
    folders = [os.path.join(ROOT, "tests/e2e"), os.path.join(options.build, "tests/e2e/stubs")]
    sys.path[:0] = folders
    os.environ["QKV_BIN_DIR"] = os.path.join(options.build, "bin")
    os.environ["PYTHONPATH"] = ":".join(folders)
    from attackers import ATTACKS, memory_bound
    from daemon import Daemon
    from victim import MIB, Attacker, Victim, percentile

    if options.list:
        print("\n".join(ATTACKS))
        return 0
    processors = sorted(os.sched_getaffinity(0))
    half = len(processors) // 2
    if options.apart and half == 0:
        sys.exit("measure.py: --apart needs two processors")
    if options.apart:
        os.sched_setaffinity(0, processors[half:])  # later threads and processes, too
    pin = functools.partial(os.sched_setaffinity, 0, processors[:half]) if options.apart else None

    def observe(victim, seconds):
        if options.apart:
            prioritize(os.SCHED_RR)
        seen = victim.look(seconds)
        if options.apart:
            prioritize(os.SCHED_OTHER)  # before the next attacker is started
        return seen

    print("| attack | p50, quiet and attacked | p99, quiet (lowest to highest), elsewhere and attacked | of quiet, elsewhere and "
          "attacked | health check, p99 | longest | resident memory |")
    print("|---|---|---|---|---|---|---|")
    missed = []
    for name in options.only or ATTACKS:
        quiet, elsewhere, attacked = [], [], []
        with Daemon(before=pin) as daemon, Daemon(before=pin) as other:
            victim = Victim(daemon)
            observe(victim, 1)
            for _ in range(options.rounds):
                quiet.append(observe(victim, options.seconds))
                for target, looks in ((other, elsewhere), (daemon, attacked)):
                    with Attacker(target, name):
                        observe(victim, min(2, options.seconds))  # until it is under way
                        looks.append(observe(victim, options.seconds))
                    observe(victim, 1)  # until it is over

        def median(looks, part):
            return statistics.median(percentile(look.decodes, part) for look in looks) * 1e3

        quiets = [percentile(look.decodes, .99) * 1e3 for look in quiet]
        floor, times = (statistics.median(percentile(look.decodes, .99) * 1e3 / before
                                          for look, before in zip(looks, quiets, strict=True)) for looks in (elsewhere, attacked))
        checks = [check for look in attacked for check in look.checks]
        before, after = quiet[0].rss / MIB, max(look.rss for look in attacked) / MIB
        failures = [failure for look in attacked for failure in look.failures]
        print(f"| {name} | {median(quiet, .5):.2f}, {median(attacked, .5):.2f} ms | "
              f"{statistics.median(quiets):.2f} ({min(quiets):.2f} to {max(quiets):.2f}), {median(elsewhere, .99):.2f}, "
              f"{median(attacked, .99):.2f} ms | {floor:.1f}, {times:.1f} | "
              f"{percentile(checks, .99) * 1e3:.1f} ms | {max(checks) * 1e3:.1f} ms | "
              f"{before:.0f}, {after:.0f} MiB |", flush=True)
        missed += [f"{name}: p99 {times:.1f} times that of quiet, {floor:.1f} with the attack elsewhere"] if times > 2 else []
        missed += [f"{name}: a health check took {max(checks) * 1e3:.0f} ms"] if max(checks) > 0.1 else []
        missed += [f"{name}: {after:.0f} MiB"] if after > before + memory_bound(name) else []
        missed += [f"{name}: {len(failures)} calls failed: {failures[0].details()}"] if failures else []
    for line in missed:
        print("missed:", line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
