"""The lint finds what it is for: each case plants one violation into a small clean tree.

Usage: selftest.py
"""

import json
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
HEADER = "// A.\n#ifndef QKV_ENGINE_BASE_A_H\n#define QKV_ENGINE_BASE_A_H\n\nint qkv_a(int x);\n\n#endif\n"
CLEAN = {
    "engine/base/a.h": HEADER,
    "engine/base/a.c": '#include "engine/base/a.h"\n\nint qkv_a(int x) {\n  return x + 1;  // not strcpy()\n}\n',
    "server/metrics.h": "#ifndef QKV_SERVER_METRICS_H\n#define QKV_SERVER_METRICS_H\n"
                        '#define QKV_METRIC_MAP(X) \\\n  X(CALLS, "qkvd_calls_total", QKV_COUNTER, "Calls.")\n'
                        "#endif\n",
    "server/main.c": 'static const qkv_option table[] = {{"threads", QKV_OPTION_INTEGER, offsetof(config, threads)}};\n'
                     "void qkv_b(config *c) {\n  use(QKV_METRIC_CALLS, c->threads);\n}\n",
    "client/c/qkv.h": "#ifndef QKV_CLIENT_C_QKV_H\n#define QKV_CLIENT_C_QKV_H\n// See qkv_c().\nint qkv_d(int x);\n#endif\n",
    "client/c/qkv.map": "{\n  global:\n    qkv_d;\n  local:\n    *;\n};\n",
    "proto/qkv/v1/a.proto": "service A {\n  rpc Do(B) returns (C);\n}\n",
    "docs/protocol.md": "# Protocol\n\nLost is named here, and --threads.\n\n| call | kind |\n|---|---|\n| `A.Do` | unary |\n",
}
LONG_BODY = "  use(1);\n" * 95

# script, file, text that is appended to it, what must be said
CASES = [
    ("source.py", "engine/base/a.c", '#include "server/rpc/rpc.h"\n', "must not include server/rpc/rpc.h"),
    ("source.py", "engine/codec/b.c", '#include "engine/cache/layer.h"\n', "must not include engine/cache/layer.h"),
    ("source.py", "storage/b.c", '#include "engine/codec/codec.h"\n', "must not include engine/codec/codec.h"),
    ("source.py", "client/c/b.c", '#include "server/rpc/rpc.h"\n', "must not include server/rpc/rpc.h"),
    ("source.py", "client/c/b.c", '#include "engine/cache/store.h"\n', "must not include engine/cache/store.h"),
    ("source.py", "server/b.c", '#include "client/c/qkv.h"\n', "must not include client/c/qkv.h"),
    ("source.py", "engine/base/a.c", "#include <grpc/grpc.h>\n", "must not include grpc/grpc.h"),
    ("source.py", "engine/base/a.c", "void f(char *a) {\n  strcpy (a, a);\n}\n", "strcpy is banned"),
    ("source.py", "engine/base/a.c", "void f(void) {\n" + LONG_BODY + "}\n", "function of 97 lines"),
    ("source.py", "engine/base/a.c", "int x;\n" * 701, "lines, at most 700"),
    ("source.py", "engine/base/a.c", "int x; \n", "trailing blanks"),
    ("source.py", "engine/base/a.c", "\tint x;\n", "tab"),
    ("source.py", "docs/a.md", "TO" + "DO: more\n", "unfinished"),
    ("source.py", "docs/a.md", "see /ho" + "me/someone/notes\n", "path of somebody's machine"),
    ("source.py", "scratch.txt", "x\n", "does not belong at the top level"),
    ("source.py", "engine/base/b.h", "int qkv_c(void);\n", "no include guard"),
    ("tables.py", "server/metrics.h", '  X(LOST, "qkvd_lost_total", QKV_COUNTER, "Lost.")\n', "qkvd_lost_total is never updated"),
    ("tables.py", "server/main.c", '{"lost", QKV_OPTION_FLAG, offsetof(config, lost)}\n', "--lost is never used"),
    ("tables.py", "server/main.c", '{"lost", QKV_OPTION_FLAG, offsetof(config, lost)}\n', "--lost is in no guide"),
    ("tables.py", "client/c/qkv.h", "int qkv_lost(void);\n", "does not export qkv_lost"),
    ("tables.py", "client/c/qkv.map", "    qkv_lost;\n", "exports qkv_lost, which"),
    ("tables.py", "proto/qkv/v1/a.proto", "service B {\n  rpc Lost(B) returns (C);\n}\n", "does not list Lost"),
]


def write_tree(root, files):
    for name, content in files.items():
        os.makedirs(os.path.dirname(os.path.join(root, name)) or root, exist_ok=True)
        with open(os.path.join(root, name), "w") as file:
            file.write(content)


def run(command, cwd):
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


def check_sources():
    """The number of failures among the clean tree and CASES."""
    failures = 0
    for script, path, text, expected in [("source.py", None, "", None), ("tables.py", None, "", None), *CASES]:
        with tempfile.TemporaryDirectory() as root:
            write_tree(root, CLEAN)
            if path:
                write_tree(root, {path: CLEAN.get(path, "") + text})
            status, output = run([sys.executable, os.path.join(HERE, script), "."], root)
        found = any(expected in line and line.startswith(path.split("/")[0])
                    for line in output.splitlines()) if expected else output == ""
        if status != (1 if expected else 0) or not found:
            failures += 1
            print(f"{script} {path}: expected {expected or 'no violation'}, got exit {status}\n{output}")
    return failures


def check_builds():
    """The number of failures of what needs a build: self-containment and exported symbols."""
    failures = 0
    with tempfile.TemporaryDirectory() as root:
        write_tree(root, CLEAN)
        build = os.path.join(root, "build")
        command = f"cc -I. -Wall -Werror -std=gnu17 -c engine/base/a.c -o {build}/a.o"
        entry = {"directory": root, "command": command, "file": os.path.join(root, "engine/base/a.c")}
        write_tree(root, {"build/compile_commands.json": json.dumps([entry])})
        subprocess.run(command.split(), cwd=root, check=True)
        subprocess.run(["ar", "rc", f"{build}/liba.a", f"{build}/a.o"], cwd=root, check=True)
        headers = [sys.executable, os.path.join(HERE, "headers.py"), ".", build]
        symbols = [os.path.join(HERE, "symbols.sh"), build]
        for script in (headers, symbols):
            status, output = run(script, root)
            if status != 0:
                failures += 1
                print(f"{script} on the clean tree: exit {status}\n{output}")
        write_tree(root, {"engine/base/b.h": "size_t qkv_b(void);\n", "c.c": "int stray(void) {\n  return 1;\n}\n"})
        subprocess.run(["cc", "-c", "c.c", "-o", f"{build}/c.o"], cwd=root, check=True)
        subprocess.run(["ar", "rc", f"{build}/libc.a", f"{build}/c.o"], cwd=root, check=True)
        for script, expected in ((headers, "engine/base/b.h: does not compile alone"), (symbols, "exports stray")):
            status, output = run(script, root)
            if status != 1 or expected not in output:
                failures += 1
                print(f"{script}: not found: {expected}\n{output}")
    return failures


def main():
    failures = check_sources() + check_builds()
    print(f"{len(CASES) + 2} planted violations, {failures} failures")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
