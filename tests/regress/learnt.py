#!/usr/bin/env python3
"""Quality of a daemon that has learnt from traffic: what its users get with default options but the bits.

Starts a qkvd, teaches it with windows of one text, takes the calibration that it has learnt and tried, and measures
that with qkv-bench on other texts, as docs/quality.md says; one row is scored through the daemon, too. Compares with the
committed learnt.csv, or writes it anew, and the table of docs/quality.md. Exit status 1 where a code has become worse
by more than chance (README.md), takes other bits, or the daemon's own figure is another one.
"""

import argparse
import csv
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time

import quality

HERE = os.path.dirname(os.path.abspath(__file__))
DATA = os.path.join(HERE, "..", "data", "smollm2")
COMMITTED = os.path.join(HERE, "learnt.csv")
TEXTS = ["prose.txt", "report.txt", "licence.txt"]
SETTINGS = ["plain:4", "plain:3", "plain:2", "attend:8", "attend:4", "attend:3", "attend:2.5", "attend:2", "attend:1.5",
            "archive:4", "archive:3", "archive:2.5", "archive:2", "ecsq:4", "ecsq:3", "ecsq:2.5", "ecsq:2"]
# What is scored through the daemon, frame and bits, and the setting that has the same codes: the archive codec is what
# sessions that are fetched have by default.
CHECKED = [("attend", 2, "attend:2"), ("archive", 2, "ecsq:2")]
TEACHING_WINDOWS = 24  # of 768 tokens that are coded: more than the daemon learns from
DEADLINE_S = 120
# What a run may differ by from the committed one: README.md. Of the KL also as many standard errors of both.
BITS, TIMES, ERRORS = 0.03, 1.15, 2
SAME = 0.03  # part by which the daemon's KL may differ from that of the same codes in process


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

    def run(self, program, *arguments):
        command = [os.path.join(self.binaries, program), *arguments, "--target", self.target]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(DEADLINE_S)
        self.log.close()


def texts(names):
    return [word for name in names for word in ("--text", os.path.join(DATA, name))]


def score(daemon, options, names, windows, *more):
    return json.loads(daemon.run("qkv-worker", "score", "--model", options.model, "--threads", str(options.threads),
                                 "--windows", str(windows), "--json", *texts(names), *more))


def measure(options, calibration, windows, settings):
    """Rows of qkv-bench; in a session rows are fp16."""
    command = [os.path.join(options.bin, "qkv-bench"), "quality", "--model", options.model, "--threads",
               str(options.threads), "--windows", str(windows), "--calibration", calibration, "--dtype", "fp16",
               "--json", *texts(TEXTS)]
    for setting in settings:
        command += ["--setting", setting]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line) for line in output.splitlines()][1:]  # the first one is the exact cache's


def row_of(setting, got):
    frame, bits = setting.split(":")
    names = {"plain": "data-free", "ecsq": "learnt, archive codec"}
    name = f"{names.get(frame, f'learnt, {frame} frame')}, {bits} bits"
    return {"scheme": name, "bits_per_coordinate_all_in": f"{got['bits_per_coordinate']:.4f}",
            "kl_bits": f"{got['kl_bits']:.6f}", "kl_bits_error": f"{got['kl_bits_error']:.6f}",
            "bits_per_token": f"{got['bits_per_token']:.5f}",
            "delta_bits_per_token": f"{got['delta_bits_per_token']:.5f}", "top1": f"{got['top1']:.4f}"}


def export(daemon, options, path):
    """The daemon's calibration goes to a file."""
    daemon.run("qkvctl", "calibrate", os.path.basename(options.model).removesuffix(".gguf"), "--output", path)


def learn(daemon, options):
    score(daemon, options, ["calibration.txt"], TEACHING_WINDOWS, "--prefill", "768")
    verdict = daemon.wait_for("calibrated")
    print(f"learnt from {verdict['tokens']} tokens; the trial says {verdict['attention_error']:.4f} for "
          f"{verdict['data_free']:.4f}, {verdict['parts_data_free']} of {verdict['parts']} parts data-free", flush=True)


def check_daemon(daemon, options, path):
    """Where what the daemon itself gives with CHECKED differs from the figures in process, as texts. The first session of a
    kind has the calibration tried anew, so each has the one that is in force by then, in the file `path`."""
    for frame, bits, setting in CHECKED:
        through = score(daemon, options, TEXTS, 1, "--frame", frame, "--bits", str(bits))
        export(daemon, options, path)
        within = measure(options, path, 1, [setting])[0]
        print(f"{setting}, one window of each text: KL {through['kl_bits']:.6f} through the daemon, "
              f"{within['kl_bits']:.6f} in process", flush=True)
        if abs(through["kl_bits"] - within["kl_bits"]) > SAME * within["kl_bits"]:
            yield f"{setting}: the daemon's KL is {through['kl_bits']}, in process it is {within['kl_bits']}"


def measure_all(options):
    """The rows of learnt.csv, and what is wrong with the daemon's own figure."""
    with tempfile.TemporaryDirectory() as folder:
        calibration = os.path.join(folder, "learnt.qkvc")
        daemon = Daemon(options.bin, folder, "--data-dir", os.path.join(folder, "data"))
        learn(daemon, options)
        export(daemon, options, calibration)
        wrong = list(check_daemon(daemon, options, os.path.join(folder, "later.qkvc")))
        daemon.stop()
        got = measure(options, calibration, options.windows, SETTINGS)
    rows = [row_of(setting, one) for setting, one in zip(SETTINGS, got)]
    for row in rows:
        print(", ".join(row.values()), flush=True)
    return rows, wrong


def worse(old, new):
    """What of a row has become worse than the committed one by more than chance, as texts."""
    bits = [float(row["bits_per_coordinate_all_in"]) for row in (old, new)]
    if abs(bits[1] - bits[0]) > BITS:
        yield f"bits were {bits[0]}, are {bits[1]}"
    kl = [float(row["kl_bits"]) for row in (old, new)]
    chance = ERRORS * math.hypot(*(float(row["kl_bits_error"]) for row in (old, new)))
    if kl[1] > TIMES * kl[0] + chance:
        yield f"KL was {kl[0]}, is {kl[1]}"


def compare(old, new):
    for scheme in sorted(old.keys() ^ new.keys()):
        yield f"{scheme}: " + ("not measured any more" if scheme in old else "new")
    for scheme in old.keys() & new.keys():
        yield from (f"{scheme}: {text}" for text in worse(old[scheme], new[scheme]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, metavar="DIR", help="directory with qkvd and its tools")
    parser.add_argument("--model", required=True, metavar="FILE", help="what deploy/smollm2.sh has downloaded")
    parser.add_argument("--windows", type=int, default=6, metavar="N", help="of each text (default 6, as in learnt.csv)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="of the model; 0: one for each processor")
    parser.add_argument("--update", action="store_true", help="write learnt.csv anew, and the tables of docs/quality.md")
    options = parser.parse_args()
    rows, wrong = measure_all(options)
    for text in wrong:
        print(text)
    if options.update:
        with open(COMMITTED, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        quality.write_page()
        return 1 if wrong else 0
    differences = list(compare(quality.read(COMMITTED), {row["scheme"]: row for row in rows}))
    for text in differences:
        print(text)
    return 1 if differences or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
