#!/usr/bin/env python3
"""Quality of a daemon that has learnt from traffic: what its users get with default options but the bits.

Starts a qkvd, teaches it with windows of one text, then scores others through it, as docs/quality.md says. Prints a
table in Markdown; --csv writes the figures, too.
"""

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
DATA = os.path.join(HERE, "..", "data", "smollm2")
TEXTS = ["prose.txt", "report.txt", "licence.txt"]
# Frame, bits of keys, bits of values.
LEARNT = [("attend", 8, 8), ("attend", 4, 4), ("attend", 3, 3), ("attend", 2.5, 2.5), ("attend", 2, 2),
          ("attend", 1.5, 1.5), ("archive", 4, 4), ("archive", 3, 3), ("archive", 2.5, 2.5), ("archive", 2, 2)]
DATA_FREE = [("attend", 4, 4), ("attend", 3, 3), ("attend", 2, 2)]
TEACHING_WINDOWS = 24  # of 768 tokens that are coded: more than the daemon learns from
DEADLINE_S = 120


class Daemon:
    """A qkvd on a socket of its own."""

    def __init__(self, binaries, folder, *options):
        self.binaries = binaries
        self.target = "unix:" + os.path.join(folder, "socket")
        self.log = open(os.path.join(folder, "log"), "w+")
        self.process = subprocess.Popen([os.path.join(binaries, "qkvd"), "--listen", self.target, *options],
                                        stdout=self.log, stderr=self.log)
        self.wait_for("ready")

    def wait_for(self, message):
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end and self.process.poll() is None:
            for line in open(self.log.name):
                if '"message":"' + message + '"' in line:
                    return json.loads(line)
            time.sleep(0.1)
        sys.exit(f"qkvd has not logged {message!r}:\n" + open(self.log.name).read())

    def score(self, model, texts, windows, *options):
        command = [os.path.join(self.binaries, "qkv-worker"), "score", "--model", model, "--threads", "0",
                   "--windows", str(windows), "--target", self.target, "--json", *options]
        for text in texts:
            command += ["--text", os.path.join(DATA, text)]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(DEADLINE_S)
        self.log.close()


def measure(daemon, model, windows, way, what):
    frame, bits_k, bits_v = way
    got = daemon.score(model, TEXTS, windows, "--frame", frame, "--bits-k", str(bits_k), "--bits-v", str(bits_v))
    return {"code": what, "frame": frame, "bits_k": bits_k, "bits_v": bits_v, "bits": got["bits_per_coordinate"],
            "kl_bits": got["kl_bits"], "top1": got["top1"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, metavar="DIR", help="directory with qkvd and qkv-worker")
    parser.add_argument("--model", required=True, metavar="FILE", help="what deploy/smollm2.sh has downloaded")
    parser.add_argument("--windows", type=int, default=6, metavar="N", help="of each text (default 6)")
    parser.add_argument("--csv", metavar="FILE")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(options.bin, folder, "--calibrate-tokens", "0")
        rows += [measure(daemon, options.model, options.windows, way, "data-free") for way in DATA_FREE]
        daemon.stop()
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(options.bin, folder)
        daemon.score(options.model, ["calibration.txt"], TEACHING_WINDOWS, "--prefill", "768")
        verdict = daemon.wait_for("calibrated")
        print(f"learnt from {verdict['tokens']} tokens; the trial says {verdict['attention_error']:.4f} for "
              f"{verdict['data_free']:.4f}, {verdict['parts_data_free']} of {verdict['parts']} parts data-free\n")
        rows += [measure(daemon, options.model, options.windows, way, "learnt") for way in LEARNT]
        daemon.stop()
    print("| code | frame | K/V | bits all in | KL | top-1 |\n|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {row['code']} | {row['frame']} | {row['bits_k']:g}/{row['bits_v']:g} | {row['bits']:.3f} | "
              f"{row['kl_bits']:.5f} | {row['top1']:.3f} |")
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
