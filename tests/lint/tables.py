"""Every metric is updated somewhere and every option is used somewhere, outside the tables that list them, and the guides
tell of each option of the daemon; libqkv exports the functions of its header and no others; docs/protocol.md lists every call.

Usage: tables.py ROOT
"""

import os
import re
import sys

from files import Report, is_c, project_files, read

CLIENT_HEADER, EXPORTS = "client/c/qkv.h", "client/c/qkv.map"
PROTOCOL = "docs/protocol.md"
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


def check_guides(report, sources, guides):
    """Options of the daemon, as --name or `name`."""
    for path in sources:
        if not path.startswith("server/"):
            continue
        for name, _ in OPTION_ROW.findall(sources[path]):
            if name not in ("help", "version") and not re.search(rf"(--|`){name}(?![\w-])", guides):
                report.violation(path, 0, f"option --{name} is in no guide: docs/*.md, README.md")


def check_exports(report, header, exports):
    """The functions of the header and the linker's list of exports are the same."""
    if header is None or exports is None:
        return
    declared = set(re.findall(r"\b(qkv_\w+)\(", re.sub(r"//.*", "", header)))
    exported = set(re.findall(r"\b(qkv_\w+);", re.sub(r"#.*", "", exports)))
    for name in sorted(declared - exported):
        report.violation(EXPORTS, 0, f"does not export {name}, which {CLIENT_HEADER} declares")
    for name in sorted(exported - declared):
        report.violation(EXPORTS, 0, f"exports {name}, which {CLIENT_HEADER} does not declare")


def check_calls(report, protocol, contracts):
    """The list of calls in the protocol guide has every call of the contract."""
    if protocol is None:
        return
    listed = set(re.findall(r"\w+", "\n".join(re.findall(r"^\| (`.*?) \|", protocol, re.MULTILINE))))
    for path, text in contracts.items():
        for call in re.findall(r"^\s*rpc (\w+)\(", text, re.MULTILINE):
            if call not in listed:
                report.violation(path, 0, f"{PROTOCOL} does not list {call}")


def main(root):
    report = Report()
    sources = {path: read(root, path) for path in project_files(root) if is_c(path)}
    check_metrics(report, sources)
    check_options(report, sources)
    check_guides(report, sources, "\n".join(read(root, path) for path in project_files(root)
                                            if path == "README.md" or re.fullmatch(r"docs/[\w-]+\.md", path)))
    check_exports(report, sources.get(CLIENT_HEADER), read(root, EXPORTS) if CLIENT_HEADER in sources else None)
    check_calls(report, read(root, PROTOCOL) if os.path.exists(os.path.join(root, PROTOCOL)) else None,
                {path: read(root, path) for path in project_files(root) if path.startswith("proto/qkv/")})
    report.exit()


if __name__ == "__main__":
    main(sys.argv[1])
