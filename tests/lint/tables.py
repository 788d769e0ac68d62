"""Every metric is updated somewhere and every option is used somewhere, outside the tables that list them.

Usage: tables.py ROOT
"""

import re
import sys

from files import Report, is_c, project_files, read

METRIC_HEADER = "server/metrics.h"
# A row of the metric X-macro: X(APPEND_TOKENS, "qkvd_append_tokens_total", QKV_COUNTER, "..."). Its enum constant is
# QKV_METRIC_APPEND_TOKENS.
METRIC_ROW = re.compile(r'^\s*X\((\w+),[^"]*"(qkvd_\w+)"', re.MULTILINE)
# A row of an option table: {"memory-budget", QKV_OPTION_BYTES, offsetof(type, memory_budget), ..., or AT(field),
# a file's own short form of it.
OPTION_ROW = re.compile(r'\{\s*"([\w-]+)",\s*QKV_OPTION_\w+,\s*(?:offsetof\([^,()]+,|AT\()\s*(?:\w+\.)*(\w+)\)')


def check_metrics(report, sources):
    text = sources.get(METRIC_HEADER)
    if text is None:
        return
    rows = METRIC_ROW.findall(text)
    if not rows:
        report.violation(METRIC_HEADER, 0, "no rows X(ID, ..., \"qkvd_...\") found: has the table changed its form?")
    users = "\n".join(text for path, text in sources.items()
                      if path.startswith("server/") and not path.startswith("server/metrics."))
    for row, name in rows:
        if not re.search(rf"\bQKV_METRIC_{row}\b", users):
            report.violation(METRIC_HEADER, 0, f"metric {name} is never updated")


def check_options(report, sources):
    tables = 0
    for path, text in sources.items():
        if path.startswith("tests/"):
            continue
        folder = path.split("/")[0] + "/"
        for name, field in OPTION_ROW.findall(text):
            tables += 1
            use = re.compile(rf"(->|\.){re.escape(field)}\b")
            if not any(use.search(other) for user, other in sources.items() if user.startswith(folder)):
                report.violation(path, 0, f"option --{name} is never used")
    if "server/main.c" in sources and not tables:
        report.violation("server", 0, "no option tables found: have they changed their form?")


def main(root):
    report = Report()
    sources = {path: read(root, path) for path in project_files(root) if is_c(path)}
    check_metrics(report, sources)
    check_options(report, sources)
    report.exit()


if __name__ == "__main__":
    main(sys.argv[1])
