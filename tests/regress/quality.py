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
DATA = os.path.join(HERE, "..", "data")
TINYLM = os.path.join(DATA, "tinylm")
PAGE = os.path.join(HERE, "..", "..", "docs", "quality.md")
# column: relative and absolute difference that is let pass; README.md says where they are from.
TOLERANCES = {
    "bits_per_coordinate_all_in": (0, 0),
    "bits_per_byte": (0, 2e-4),
    "delta_bits_per_byte": (0, 2e-4),
    "bits_per_token": (0, 1e-3),
    "delta_bits_per_token": (0, 1e-3),
    "kl_bits": (0.01, 3e-6),
    "rel_mse_k": (1e-3, 2e-6),
    "rel_mse_v": (1e-3, 2e-6),
    "top1": (0, 2e-3),
}
# What is measured of SmolLM2. A line more or less here, then --update.
SMOLLM2_SETTINGS = [
    "plain:8", "plain:4", "plain:3", "plain:2", "plain:4:auto",
    "attend:8", "attend:4", "attend:3", "attend:2.5", "attend:2", "attend:1.5", "attend:4@2",
    "archive:4", "archive:3", "archive:2.5", "archive:2", "archive:1.5",
    "ecsq:2.75", "ecsq:2.25", "ecsq:2.125", "ecsq:1.75",
]


# OpenBLAS has kernels for each processor, whose sums differ in the last bits, and so does what is decided by them.
SAME_SUMS = dict(os.environ, OPENBLAS_CORETYPE="Nehalem")


class Suite:
    """What is measured, and the committed file that it is compared with."""

    def __init__(self, model, folder, texts, windows, committed, settings=(), options=(), learn=()):
        self.model, self.folder, self.texts, self.windows = model, folder, texts, windows
        self.committed = os.path.join(HERE, committed)
        self.settings, self.options, self.learn = list(settings), list(options), list(learn)

    def calibrate(self, binaries, folder):
        """A calibration of the model, learnt as docs/calibration.md says."""
        path = os.path.join(folder, "model.qkvc")
        subprocess.run([os.path.join(binaries, "qkv-worker"), "calibrate", "--model", self.model, "--text",
                        os.path.join(self.folder, "calibration.txt"), *self.learn, "--output", path], check=True,
                       stdout=subprocess.DEVNULL, env=SAME_SUMS)
        return path

    def measure(self, binaries, output):
        with tempfile.TemporaryDirectory() as folder:
            command = [os.path.join(binaries, "qkv-bench"), "quality", "--model", self.model, "--windows",
                       str(self.windows), "--calibration", self.calibrate(binaries, folder), "--csv", output]
            for text in self.texts:
                command += ["--text", os.path.join(self.folder, text)]
            for setting in self.settings:
                command += ["--setting", setting]
            subprocess.run(command + self.options, check=True, stdout=subprocess.DEVNULL, env=SAME_SUMS)


def tinylm(full):
    # One thread: figures are then those of the same sums on every machine, and other tests have the processors.
    # The short one is untried: what a trial decides by small differences is not the same on every machine.
    return Suite(TINYLM, TINYLM, ["heldout_kjv.txt", "heldout_jargon.txt"], 16 if full else 1,
                 "quality.csv" if full else "quality_short.csv", options=["--threads", "1"],
                 learn=[] if full else ["--untried"])


def codecs(full):
    # Every codec of the table, on one window of each text; untried as above. Unless full at 3 bits, or the codec's default.
    return Suite(TINYLM, TINYLM, ["heldout_kjv.txt", "heldout_jargon.txt"], 1, "codecs.csv",
                 options=["--threads", "1", "--codec", "all"] + ([] if full else ["--bits", "3"]), learn=["--untried"])


def smollm2(model):
    return Suite(model, os.path.join(DATA, "smollm2"), ["prose.txt", "report.txt", "licence.txt"], 2, "smollm2.csv",
                 settings=SMOLLM2_SETTINGS, learn=["--tokens", "16384", "--threads", "0"])


def read(path):
    with open(path, newline="") as file:
        return {row["scheme"]: row for row in csv.DictReader(file)}


def number(row, column):
    """A figure, or None where it is absent: the file has no such column, or it was not measured."""
    text = row.get(column)
    return float(text) if text else None


def moved(old, new):
    """What differs between two rows by more than rounding, as texts. What the old one does not have is let pass."""
    for column, (relative, absolute) in TOLERANCES.items():
        before, after = number(old, column), number(new, column)
        if before is None:
            continue
        if after is None or not abs(after - before) <= relative * abs(before) + absolute + 1e-12:
            yield f"{column} was {old[column]}, is {new.get(column) or 'absent'}"


def codec(scheme):
    """A scheme of codecs.csv without its bits."""
    return re.sub(r" [0-9.]+\b", "", scheme)


def of_one_depth(old, new):
    """What is to be found of a file of every codec at all depths where each was measured at one: a row of each codec."""
    return {scheme: row for scheme, row in old.items()
            if scheme in new or codec(scheme) not in {codec(other) for other in new}}


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


# Columns of docs/quality.md: heading, column, digits. Those that a file does not have are left out.
COLUMNS = [
    ("bits", "bits_per_coordinate_all_in", 3), ("KL", "kl_bits", 5), ("+-", "kl_bits_error", 5), ("bits/byte", "bits_per_byte", 4),
    ("delta", "delta_bits_per_byte", 4), ("bits/token", "bits_per_token", 4), ("delta", "delta_bits_per_token", 4),
    ("top-1", "top1", 3), ("MSE K", "rel_mse_k", 5), ("MSE V", "rel_mse_v", 5),
]


def table(rows):
    """A file's rows as docs/quality.md shows them; top-1 of a model of tokens only."""
    first = next(iter(rows.values()))
    columns = [column for column in COLUMNS
               if column[1] in first and (column[1] != "top1" or "bits_per_token" in first)]
    headings = ["scheme", *(heading for heading, _, _ in columns)]
    yield "| " + " | ".join(headings) + " |"
    yield "|" + "---|" * len(headings)
    for row in rows.values():
        cells = [f"{float(row[name]):.{digits}f}" if row[name] else "" for _, name, digits in columns]
        yield f"| {row['scheme']} | " + " | ".join(cells) + " |"


def with_tables(text, folder=HERE):
    """The page with the tables that its comments ask for: of FILE all rows, or those whose scheme matches PATTERN.

    <!-- table: FILE --> or <!-- table: FILE PATTERN -->
    """
    def fill(match):
        rows = read(os.path.join(folder, match.group(2)))
        shown = {scheme: row for scheme, row in rows.items() if re.search(match.group(3) or "", scheme)}
        return "\n".join([match.group(1), "", *table(shown), "", "<!-- end -->"])
    return re.sub(r"(<!-- table: (\S+)(?: ([^\n]+?))? -->)\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


def read_page():
    with open(PAGE) as file:
        return file.read()


def write_page():
    text = with_tables(read_page())
    with open(PAGE, "w") as file:
        file.write(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", required=True, metavar="DIR", help="where qkv-bench and qkv-worker are")
    parser.add_argument("--full", action="store_true", help="16 windows of each text (quality.csv) instead of one; with --codecs all depths instead of one")
    parser.add_argument("--codecs", action="store_true", help="every codec of the table (codecs.csv), on one window of each text")
    parser.add_argument("--model", metavar="FILE", help="SmolLM2 as deploy/smollm2.sh fetches it (smollm2.csv), instead of tinylm")
    parser.add_argument("--update", action="store_true", help="write the committed file anew, and the tables of docs/quality.md")
    options = parser.parse_args()
    suite = smollm2(options.model) if options.model else codecs(options.full or options.update) if options.codecs else tinylm(options.full)
    if options.update:
        suite.measure(options.bin, suite.committed)
        write_page()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "quality.csv")
        suite.measure(options.bin, path)
        old, new = read(suite.committed), read(path)
        differences = list(compare(of_one_depth(old, new) if options.codecs and not options.full else old, new))
    for text in differences:
        print(text)
    if differences:
        print("\nIf this is meant: tests/regress/quality.py --bin DIR --update (with --full, --codecs or --model as well), and "
              "say why in the commit.")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
