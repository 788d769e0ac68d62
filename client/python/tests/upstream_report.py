"""For `upstream.py`: a line for each test, as it went."""

import os

FOUND = {}


def pytest_runtest_logreport(report):
    before = FOUND.get(report.nodeid, ("",))[0]
    if before != "failed" and (report.when == "call" or report.outcome != "passed"):
        FOUND[report.nodeid] = (report.outcome, said(report))


def pytest_collectreport(report):
    if report.outcome == "failed":
        FOUND[report.nodeid] = ("failed", said(report))
    elif report.outcome == "skipped":
        FOUND[report.nodeid] = ("skipped", said(report))


def said(report):
    """The last line of what went wrong, or why it was left out."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else str(report.longrepr)).strip().splitlines()[0]


def pytest_unconfigure():
    with open(os.environ["QKV_UPSTREAM_REPORT"], "w") as out:
        for test, (outcome, text) in FOUND.items():
            out.write(f"{test}\t{outcome}\t{text}\n")
