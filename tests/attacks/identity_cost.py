#!/usr/bin/python3
"""What tokens and TLS cost a call: the smallest call's p50, and rows in and out in messages of 1 MiB, by TCP to daemons that
differ in nothing else; with these what the daemon's processor time is for a gigabyte. The ways take turns, so that a machine that
is busy is so for all of them; medians of all rounds. A plain socket and one of OpenSSL's in the same rounds say what TLS costs
without gRPC."""

import argparse
import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RPC = ("rpc", "--repeats", "1", "--rounds", "500")
ROWS = ("--repeats", "1", "--rounds", "32", "--bytes", "1MiB")
MEASURES = {"smallest call, p50": (RPC, "us_p50", "us"), "rows in, 1 MiB": (("append", *ROWS), "gbps", "GB/s"),
            "rows out, 1 MiB": (("fetch", *ROWS), "gbps", "GB/s")}


GIGABYTES = 32 * (1 << 20) / 1e9  # of a measure of rows


def processor_seconds(process):
    """Of all its threads, in nanoseconds' steps."""
    tasks = f"/proc/{process}/task"
    return sum(int(open(f"{tasks}/{task}/schedstat", encoding="ascii").read().split()[0]) for task in os.listdir(tasks)) / 1e9


def exchange(cert, key):
    """32 MiB over a socket, in pieces of 1 MiB, to a process of its own: GB/s. With a certificate TLS."""
    piece, pieces = bytes(1 << 20), 32
    with socket.create_server(("127.0.0.1", 0)) as listening:
        child = os.fork()
        if child == 0:
            taken = listening.accept()[0]
            if cert:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(cert, key)
                taken = context.wrap_socket(taken, server_side=True)
            left, into = len(piece) * pieces, bytearray(len(piece))
            while left > 0:
                left -= taken.recv_into(into)
            taken.send(b"x")
            os._exit(0)
        sending = socket.create_connection(listening.getsockname())
        if cert:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            sending = context.wrap_socket(sending)
        with sending:
            begin = time.monotonic()
            for _ in range(pieces):
                sending.sendall(piece)
            sending.recv(1)
            took = time.monotonic() - begin
        os.waitpid(child, 0)
    return len(piece) * pieces / took / 1e9


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
        shown, tls = ["--auth-file", file("auth")], ["--tls-cert", file("daemon/daemon.pem"), "--tls-key", file("daemon/daemon.key")]
        token, ca = ["--token-file", file("token")], ["--tls-ca", file("authority.pem")]
        with Daemon("--discard") as plain, Daemon("--discard", *shown) as by_token, \
                Daemon("--discard", *tls) as by_tls, Daemon("--discard", *shown, *tls) as by_both:
            ways = {"plain": (plain, []), "token": (by_token, token), "TLS": (by_tls, ca), "TLS and token": (by_both, token + ca)}
            seen = {(measure, way): [] for measure in MEASURES for way in ways}
            busy = {key: [] for key in seen}
            sockets = {"plain": [], "TLS": []}
            for _ in range(options.rounds):
                sockets["plain"].append(exchange(None, None))
                sockets["TLS"].append(exchange(file("daemon/daemon.pem"), file("daemon/daemon.key")))
                for measure, (command, field, _) in MEASURES.items():
                    for way, (daemon, more) in ways.items():
                        target = daemon.tcp.replace("127.0.0.1", "localhost")  # that the certificate is for
                        before = processor_seconds(daemon.process.pid)
                        done = subprocess.run([binary("qkv-bench"), *command, "--json", "--target", target, *more], check=True,
                                              capture_output=True, text=True, env=clean_environment())
                        seen[measure, way].append(json.loads(done.stdout)[field])
                        busy[measure, way].append((processor_seconds(daemon.process.pid) - before) / GIGABYTES)
    def row(name, medians):
        parts = [f"{median:.3g}" + (f" ({median / medians[0]:.2f})" if i else "") for i, median in enumerate(medians)]
        print(f"| {name} | " + " | ".join(parts) + " |")

    print("| | " + " | ".join(ways) + " |\n|---|" + "---|" * len(ways))
    for measure, (_, _, unit) in MEASURES.items():
        row(f"{measure}, {unit}", [statistics.median(seen[measure, way]) for way in ways])
        if unit == "GB/s":
            row("the same, daemon's processor time, s/GB", [statistics.median(busy[measure, way]) for way in ways])
    plain, tls = (statistics.median(sockets[way]) for way in ("plain", "TLS"))
    print(f"a socket without gRPC: {plain:.3g} GB/s, with TLS {tls:.3g} ({tls / plain:.2f})")


if __name__ == "__main__":
    main()
