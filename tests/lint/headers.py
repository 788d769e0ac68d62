"""Every header of ours compiles alone, and twice in one file, with the flags of our sources.

Usage: headers.py ROOT BUILD
"""

import concurrent.futures
import json
import os
import shlex
import subprocess
import sys

from files import Report, project_files


def flags_of_build(root, build):
    """Compiler and flags from the build's compilation database, of one of our own sources."""
    with open(os.path.join(build, "compile_commands.json")) as file:
        entries = json.load(file)
    ours = os.path.realpath(root) + "/engine/base/"
    entry = next(entry for entry in entries if os.path.realpath(entry["file"]).startswith(ours))
    words = shlex.split(entry["command"])
    compiler = next(word for word in words if os.path.basename(word) != "ccache")
    flags = [word for word in words if word.startswith(("-W", "-D", "-std=", "-I"))]
    return compiler, flags + ["-isystem", os.path.join(build, "proto", "generated")]


def compile_alone(root, compiler, flags, header):
    text = f'#include "{header}"\n#include "{header}"\n'
    command = [compiler, *flags, "-I", root, "-fsyntax-only", "-x", "c", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True)


def main(root, build):
    report = Report()
    compiler, flags = flags_of_build(root, build)
    headers = [path for path in project_files(root) if path.endswith(".h")]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(lambda header: compile_alone(root, compiler, flags, header), headers)
        for header, result in zip(headers, results):
            if result.returncode != 0:
                report.violation(header, 0, "does not compile alone:\n" + result.stderr.rstrip())
    report.exit()


if __name__ == "__main__":
    main(*sys.argv[1:3])
