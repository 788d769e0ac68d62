#!/usr/bin/python3
"""Each alert has its lines in docs/operations.md, and a test in which it fires and one in which it does not.

Usage: tests/deploy/alerts.py. promtool runs these tests in tests/e2e/test_http.py.
"""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus"


def section(text, anchor):
    """The lines below the heading whose address is `anchor`."""
    for heading, body in re.findall(r"^#+ (.+)\n((?:(?!#).*\n)*)", text, re.MULTILINE):
        if re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") == anchor:
            return body.strip()
    return ""


def main():
    alerts = re.split(r"^ +- alert: ", (RULES / "rules.yml").read_text(), flags=re.MULTILINE)[1:]
    tests = (RULES / "rules_test.yml").read_text()
    assert len(alerts) > 10
    for alert in alerts:
        name = alert.split("\n", 1)[0]
        runbook = re.search(r"^ +runbook_url: (\S+)#(\S+)$", alert, re.MULTILINE)
        assert runbook, f"{name} has no runbook"
        assert runbook[2] == name.lower(), f"{name}: its runbook is {runbook[2]}"
        assert len(section((ROOT / runbook[1]).read_text(), runbook[2])) > 40, f"{runbook[1]} says nothing of {name}"
        assert re.search(rf"alertname: {name}\b", tests), f"no test has {name} quiet"
    assert re.search(rf"exp_samples: \[{{value: {len(alerts)}}}\]", tests), "a test has not all alerts firing"
    print(f"{len(alerts)} alerts: passed")


if __name__ == "__main__":
    main()
