#!/usr/bin/env python3
"""Measures our codes with `qkv-bench quality` and compares with the committed figures, or writes them anew.

Exit status 1 where a figure has moved by more than rounding (README.md), where a scheme is missing or new.
"""

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
DATA = os.path.join(HERE, "..", "data", "tinylm")
PAGE = os.path.join(HERE, "..", "..", "docs", "quality.md")
TEXTS = ["heldout_kjv.txt", "heldout_jargon.txt"]
# column: relative and absolute difference that is let pass; README.md says where they are from.
TOLERANCES = {
    "bits_per_coordinate_all_in": (0, 0),
    "bits_per_byte": (0, 2e-4),
    "delta_bits_per_byte": (0, 2e-4),
    "kl_bits": (0.01, 3e-6),
    "rel_mse_k": (1e-3, 2e-6),
    "rel_mse_v": (1e-3, 2e-6),
}


def calibrate(binaries, folder):
    """A calibration of the test model, learnt as docs/calibration.md says."""
    path = os.path.join(folder, "tinylm.qkvc")
    subprocess.run([os.path.join(binaries, "qkv-worker"), "calibrate", "--model", DATA, "--text",
                    os.path.join(DATA, "calibration.txt"), "--output", path], check=True, stdout=subprocess.DEVNULL)
    return path


def measure(binaries, windows, output):
    with tempfile.TemporaryDirectory() as folder:
        command = [os.path.join(binaries, "qkv-bench"), "quality", "--model", DATA, "--windows", str(windows),
                   "--calibration", calibrate(binaries, folder), "--csv", output]
        for text in TEXTS:
            command += ["--text", os.path.join(DATA, text)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def read(path):
    with open(path, newline="") as file:
        return {row["scheme"]: row for row in csv.DictReader(file)}


def moved(old, new):
    """What differs between two rows by more than rounding, as texts."""
    for column, (relative, absolute) in TOLERANCES.items():
        before, after = float(old[column]), float(new[column])
        if not abs(after - before) <= relative * abs(before) + absolute + 1e-12:
            yield f"{column} was {old[column]}, is {new[column]}"


def compare(old, new):
    """All differences between two files, as texts."""
    for scheme in old:
        if scheme not in new:
            yield f"{scheme}: not measured any more"
    for scheme, row in new.items():
        if scheme not in old:
            yield f"{scheme}: new"
        else:
            yield from (f"{scheme}: {text}" for text in moved(old[scheme], row))


HEADINGS = ["scheme", "bits", "KL", "bits/byte", "delta", "MSE K", "MSE V"]


def table(rows):
    """A file's rows as docs/quality.md shows them."""
    yield "| " + " | ".join(HEADINGS) + " |"
    yield "|" + "---|" * len(HEADINGS)
    for row in rows.values():
        bits, *rest = [float(value) for name, value in row.items() if name != "scheme"]
        bits_per_byte, delta, kl, error_k, error_v = rest
        yield (f"| {row['scheme']} | {bits:.3f} | {kl:.5f} | {bits_per_byte:.4f} | {delta:.4f} | {error_k:.5f} | "
               f"{error_v:.5f} |")


def with_tables(text, folder=HERE):
    """The page with the tables that its comments ask for."""
    def fill(match):
        lines = table(read(os.path.join(folder, match.group(2))))
        return "\n".join([match.group(1), "", *lines, "", "<!-- end -->"])
    return re.sub(r"(<!-- table: (\S+) -->)\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def read_page():
    with open(PAGE) as file:
        return file.read()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", required=True, metavar="DIR", help="where qkv-bench and qkv-worker are")
    parser.add_argument("--full", action="store_true", help="16 windows of each text (quality.csv) instead of one")
    parser.add_argument("--update", action="store_true", help="write the committed file anew, and the tables of docs/quality.md")
    options = parser.parse_args()
    committed = os.path.join(HERE, "quality.csv" if options.full else "quality_short.csv")
    windows = 16 if options.full else 1
    if options.update:
        measure(options.bin, windows, committed)
        text = with_tables(read_page())
        with open(PAGE, "w") as file:
            file.write(text)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "quality.csv")
        measure(options.bin, windows, path)
        differences = list(compare(read(committed), read(path)))
    for text in differences:
        print(text)
    if differences:
        print("\nIf this is meant: tests/regress/quality.py --bin DIR --update (and --full), and say why in the commit.")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
