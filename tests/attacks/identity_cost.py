#!/usr/bin/python3
"""What tokens and TLS cost a call: the smallest call's p50, and rows in and out in messages of 1 MiB, by TCP to daemons that
differ in nothing else. The ways take turns, so that a machine that is busy is so for all of them; medians of all rounds."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RPC = ("rpc", "--repeats", "1", "--rounds", "500")
ROWS = ("--repeats", "1", "--rounds", "32", "--bytes", "1MiB")
MEASURES = {"smallest call, p50": (RPC, "us_p50", "us"), "rows in, 1 MiB": (("append", *ROWS), "gbps", "GB/s"),
            "rows out, 1 MiB": (("fetch", *ROWS), "gbps", "GB/s")}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default=os.path.join(ROOT, "build/release"), help="a finished build")
    parser.add_argument("--rounds", type=int, default=20, help="measures of each way")
    return parser.parse_args()


def main():
    options = arguments()
    sys.path[:0] = [os.path.join(ROOT, "tests/e2e"), os.path.join(options.build, "tests/e2e/stubs")]
    os.environ["QKV_BIN_DIR"] = os.path.join(options.build, "bin")
    from daemon import Daemon, binary, clean_environment

    with tempfile.TemporaryDirectory() as folder:
        def file(name):
            return os.path.join(folder, name)

        authority = os.path.join(ROOT, "deploy/compose/authority.sh")
        subprocess.run([authority, "--dir", folder, "--client", "worker=team-a"], check=True, capture_output=True)
        made = subprocess.run([binary("qkvctl"), "token", "new", "team-a"], check=True, capture_output=True, text=True)
        token, line = made.stdout.splitlines()
        for name, text in (("token", token), ("auth", line)):
            with open(file(name), "w") as out:
                out.write(text + "\n")
        shown, tls = ["--auth-file", file("auth")], ["--tls-cert", file("daemon.pem"), "--tls-key", file("daemon.key")]
        token, ca = ["--token-file", file("token")], ["--tls-ca", file("authority.pem")]
        with Daemon("--discard") as plain, Daemon("--discard", *shown) as by_token, \
                Daemon("--discard", *tls) as by_tls, Daemon("--discard", *shown, *tls) as by_both:
            ways = {"plain": (plain, []), "token": (by_token, token), "TLS": (by_tls, ca), "TLS and token": (by_both, token + ca)}
            seen = {(measure, way): [] for measure in MEASURES for way in ways}
            for _ in range(options.rounds):
                for measure, (command, field, _) in MEASURES.items():
                    for way, (daemon, more) in ways.items():
                        target = daemon.tcp.replace("127.0.0.1", "localhost")  # that the certificate is for
                        done = subprocess.run([binary("qkv-bench"), *command, "--json", "--target", target, *more], check=True,
                                              capture_output=True, text=True, env=clean_environment())
                        seen[measure, way].append(json.loads(done.stdout)[field])
    print("| | " + " | ".join(ways) + " |\n|---|" + "---|" * len(ways))
    for measure, (_, _, unit) in MEASURES.items():
        medians = [statistics.median(seen[measure, way]) for way in ways]
        print(f"| {measure}, {unit} | {medians[0]:.3g} | " +
              " | ".join(f"{median:.3g} ({median / medians[0]:.2f})" for median in medians[1:]) + " |")


if __name__ == "__main__":
    main()
