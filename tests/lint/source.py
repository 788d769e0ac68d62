"""Checks of source text: includes, banned functions, marks, paths, blanks, lengths, the top level.

Usage: source.py ROOT             check
       source.py --list-c ROOT    print the C files, for clang-format
"""

import os
import re
import sys

from files import Report, is_c, project_files, read

TOP_LEVEL = {
    "CMakeLists.txt", "CMakePresets.json", "LICENSE", "README.md", ".ci",
    "client", "deploy", "docs", "engine", "proto", "server", "storage", "tests",
}
FILE_LINES_MAX = 700
FUNCTION_LINES_MAX = 90

# What each folder may include, by the beginning of the path; "" is the rule for the rest of a top-level folder.
# Read from top to bottom, the first folder that fits counts.
FOLDERS = [
    ("engine/base/", ["engine/base/"]),
    ("engine/codec/", ["engine/base/", "engine/codec/", "engine/kernel/"]),
    ("engine/kernel/", ["engine/base/", "engine/codec/", "engine/kernel/"]),
    ("engine/cache/", ["engine/"]),
    ("storage/", ["engine/base/", "storage/"]),
    ("proto/", ["engine/base/", "proto/", "qkv/v1/", "grpc/health/v1/", "grpc/reflection/v1alpha/"]),
    ("server/", ["engine/", "storage/", "proto/", "server/", "qkv/v1/", "grpc/health/v1/",
                 "grpc/reflection/v1alpha/"]),
    # The bench measures the daemon against the engine in its own process.
    ("client/bench/", ["engine/", "storage/", "proto/", "client/", "qkv/v1/"]),
    # The worker tries a calibration as the engine does.
    ("client/worker/", ["engine/base/", "engine/codec/", "engine/cache/probation.h", "engine/cache/model.h", "proto/",
                        "client/", "qkv/v1/"]),
    # qkvctl size asks a store in its own process what sessions take.
    ("client/cli/sizing.", ["engine/base/", "engine/codec/", "engine/cache/store.h", "storage/record.h", "client/"]),
    # libqkv decodes and codes pages as the daemon does.
    ("client/c/", ["engine/base/", "engine/codec/", "engine/cache/page_code.h", "proto/", "client/", "qkv/v1/"]),
    ("client/", ["engine/base/", "engine/codec/", "proto/", "client/", "qkv/v1/"]),
]
# No network below the server, and an event loop only where files are; clients bring their own.
SYSTEM_BANNED = [
    (("engine/", "proto/"), re.compile(r"^(grpc/|uv\.h|sys/socket\.h|netinet/|arpa/)")),
    (("storage/",), re.compile(r"^(grpc/|sys/socket\.h|netinet/|arpa/)")),
]
BANNED = re.compile(r"\b(strcpy|strcat|sprintf|vsprintf|gets|strtok|atoi|atol|atof|alloca)\s*\(")
MARK = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
MACHINE_PATH = re.compile(r"(?<![\w.$}*])/(home|root|Users|work)/\w")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def without_comments(text):
    """The text with comments and literals blanked, line by line the same length."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def check_includes(report, path, lines):
    folder = next((folder for folder in FOLDERS if path.startswith(folder[0])), None)
    for number, line in enumerate(lines, 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        kind, name = match.groups()
        if kind == '"' and folder and not name.startswith(tuple(folder[1])):
            report.violation(path, number, f"{folder[0]} must not include {name}")
        for rooms, pattern in SYSTEM_BANNED:
            if kind == "<" and path.startswith(rooms) and pattern.match(name):
                report.violation(path, number, f"{rooms[rooms.index(path.split('/')[0] + '/')]} must not include {name}")


def check_functions(report, path, lines):
    """Functions open with a line that ends in `{` and begins in column 0, and close with `}` in column 0."""
    start = None
    for number, line in enumerate(lines, 1):
        if start is None and re.match(r"^[A-Za-z_].*\)\s*\{\s*$", line):
            start = number
        elif start is None and re.match(r"^\s+.*\)\s*\{\s*$", line) and number > 1 and \
                re.match(r"^[A-Za-z_][\w\s\*]*\(", lines[number - 2]):
            start = number - 1
        elif line.startswith("}"):
            if start and number - start + 1 > FUNCTION_LINES_MAX:
                report.violation(path, start, f"function of {number - start + 1} lines, at most {FUNCTION_LINES_MAX}")
            start = None


def check_c(report, path, text):
    code = without_comments(text).split("\n")
    check_includes(report, path, text.split("\n"))
    check_functions(report, path, code)
    for number, line in enumerate(code, 1):
        match = BANNED.search(line)
        if match:
            report.violation(path, number, f"{match.group(1)} is banned")
    if path.endswith(".h") and not re.search(r"^#ifndef (\w+_H)\n#define \1$", text, re.MULTILINE):
        report.violation(path, 1, "no include guard")


def check_text(report, path, text):
    lines = text.split("\n")
    if len(lines) - 1 > FILE_LINES_MAX and path.endswith((".c", ".h", ".py", ".sh", ".proto", ".cmake")):
        report.violation(path, 0, f"{len(lines) - 1} lines, at most {FILE_LINES_MAX}")
    for number, line in enumerate(lines, 1):
        if line != line.rstrip():
            report.violation(path, number, "trailing blanks")
        if "\t" in line and path != "deploy/debian/rules":  # a makefile
            report.violation(path, number, "tab")
        match = MARK.search(line)
        if match:
            report.violation(path, number, f"unfinished: {match.group()}")
        if MACHINE_PATH.search(line):
            report.violation(path, number, "path of somebody's machine")
    if text and not text.endswith("\n"):
        report.violation(path, len(lines), "no newline at the end")


def check(root):
    report = Report()
    files = project_files(root)
    for name in sorted({path.split(os.sep)[0] for path in files}):
        if name not in TOP_LEVEL and not (name.startswith(".") and os.path.isfile(os.path.join(root, name))):
            report.violation(name, 0, "does not belong at the top level")
    for path in files:
        if path.startswith("tests/data/") or path.startswith("tests/fuzz/corpus/") or path == "LICENSE":
            continue
        text = read(root, path)
        if text is None:
            continue
        check_text(report, path, text)
        if is_c(path):
            check_c(report, path, text)
    report.exit()


if __name__ == "__main__":
    if sys.argv[1] == "--list-c":
        print("\n".join(os.path.join(sys.argv[2], path) for path in project_files(sys.argv[2]) if is_c(path)))
    else:
        check(sys.argv[1])
