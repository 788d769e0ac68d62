#!/usr/bin/python3
"""qkvd under the seccomp profile that is shipped: io_uring works; and under the same without it: threads take its place.

The profile becomes a filter here, as a container's runtime makes one, by the numbers of this machine's asm/unistd.h.
Usage: tests/deploy/seccomp.py QKVD QKVCTL. Exits with 77, skipped, where there is no io_uring at all.
"""

import ctypes
import json
import os
import pathlib
import platform
import re
import struct
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROFILE = ROOT / "deploy/seccomp/qkvd.json"
HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Of linux/bpf_common.h, linux/seccomp.h and linux/prctl.h.
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # EPERM
SET_SECCOMP, SET_NO_NEW_PRIVS, FILTER = 22, 38, 2
URING = {"io_uring_setup", "io_uring_enter", "io_uring_register"}


def program(names):
    """A filter that allows these calls."""
    text = pathlib.Path(HEADERS[platform.machine()]).read_text()
    numbers = {name: int(number) for name, number in re.findall(r"#define __NR3?_?(\w+)\s+(\d+)", text)}
    code = [struct.pack("HBBI", LOAD, 0, 0, 4),
            struct.pack("HBBI", JUMP_EQUAL, 1, 0, ARCHITECTURES[platform.machine()]),
            struct.pack("HBBI", RETURN, 0, 0, REFUSE),
            struct.pack("HBBI", LOAD, 0, 0, 0)]
    for number in sorted(numbers[name] for name in names if name in numbers):
        code += [struct.pack("HBBI", JUMP_EQUAL, 0, 1, number), struct.pack("HBBI", RETURN, 0, 0, ALLOW)]
    code.append(struct.pack("HBBI", RETURN, 0, 0, REFUSE))
    return b"".join(code)


def confine(code):
    """In the child: from here on the filter holds."""
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((SET_NO_NEW_PRIVS, 1, 0, 0, 0),
                      (SET_SECCOMP, FILTER, ctypes.byref(Program(len(code) // 8, code)), 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def io_of(qkvd, qkvctl, names):
    """Starts qkvd under a filter, keeps an object, stops it; says how it reads and writes its files."""
    code = program(names)
    with tempfile.TemporaryDirectory(prefix="qkvd-seccomp-") as folder:
        target = f"unix:{folder}/s"
        with open(f"{folder}/log", "wb") as log:
            # The leak check of an asan build is a tracer, which the profile refuses; other tests look for leaks.
            environment = {**os.environ, "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"}
            daemon = subprocess.Popen([qkvd, "--listen", target, "--data-dir", f"{folder}/data"], stderr=log,
                                      env=environment, preexec_fn=lambda: confine(code))
        try:
            until = time.monotonic() + 60
            while not os.path.exists(f"{folder}/s") and daemon.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            for words in (["put-object", "kept", __file__], ["get-object", "kept", "--output", f"{folder}/got"], ["storage"]):
                subprocess.run([qkvctl, words[0], *words[1:], "--target", target], check=True, stdout=subprocess.DEVNULL)
            assert pathlib.Path(folder, "got").read_bytes() == pathlib.Path(__file__).read_bytes()
        finally:
            daemon.terminate()
            status = daemon.wait(60)
            log = pathlib.Path(folder, "log").read_text()
        assert status == 0, log
        opened = [json.loads(line) for line in log.splitlines() if '"storage is open"' in line]
        return opened[0]["io"]


def main():
    qkvd, qkvctl = sys.argv[1:]
    profile = json.loads(PROFILE.read_text())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    names = {name for rule in profile["syscalls"] for name in rule["names"]}
    everything = set(re.findall(r"#define __NR_(\w+)", pathlib.Path(HEADERS[platform.machine()]).read_text()))
    if io_of(qkvd, qkvctl, everything) != "uring":
        print("io_uring is not to be had here")
        sys.exit(77)
    assert io_of(qkvd, qkvctl, names) == "uring"
    assert io_of(qkvd, qkvctl, names - URING) == "pread"
    for refused in ("mount", "ptrace", "bpf", "keyctl", "kexec_load", "init_module", "unshare", "setns"):
        assert refused not in names, refused
    print("passed")


if __name__ == "__main__":
    main()
