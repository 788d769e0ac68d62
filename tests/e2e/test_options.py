"""qkvd's options: file, environment and flags, their order, and what is said of wrong ones."""

import json
import os
import pathlib
import subprocess

import pytest

from daemon import PATIENCE, Daemon, binary, clean_environment


def qkvd(*arguments, **environment):
    """A qkvd that is expected to end by itself."""
    return subprocess.run([binary("qkvd"), *arguments], env=clean_environment(**environment), capture_output=True,
                          text=True, timeout=PATIENCE)


def options_of(daemon):
    return {option.name: (option.value, option.source) for option in daemon.status().options}


def test_help_lists_every_option_with_its_environment_variable():
    result = qkvd("--help")
    assert result.returncode == 0 and result.stderr == ""
    for name in ("listen", "config", "memory-budget", "limit-message", "limit-items", "limit-sessions", "drain-grace"):
        assert f"--{name}" in result.stdout
        assert "QKVD_" + name.upper().replace("-", "_") in result.stdout
    assert "64MiB" in result.stdout


def test_version():
    result = qkvd("--version")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("qkvd 0.")


def test_default_file_environment_flag(tmp_path):
    config = tmp_path / "qkvd.yaml"
    config.write_text("memory-budget: 64MiB\nlimit-items: 10\nlimit-models: 7\ndrain-grace: 2s\n")
    environment = {"QKVD_LIMIT_ITEMS": "20", "QKVD_LIMIT_MODELS": "8"}
    with Daemon("--config", str(config), "--limit-models", "9", environment=environment) as daemon:
        options = options_of(daemon)
        assert daemon.status().kv_bytes_limit == 64 << 20
    assert options["memory-budget"][1] == "file"
    assert options["limit-items"] == ("20", "environment")
    assert options["limit-models"] == ("9", "flag")
    assert options["limit-sessions"][1] == "default"


def test_config_from_the_environment_with_listen_as_a_list(tmp_path):
    config = tmp_path / "qkvd.yaml"
    config.write_text(f"listen:\n  - unix:{tmp_path}/a.sock\n  - 127.0.0.1:0\n")
    with Daemon(listen=False, environment={"QKVD_CONFIG": str(config)}) as daemon:
        assert len(daemon.addresses) == 2
        assert os.path.exists(tmp_path / "a.sock")
        assert not daemon.addresses[1].endswith(":0")
    assert not os.path.exists(tmp_path / "a.sock")


def test_print_options_shows_what_is_in_force():
    result = qkvd("--print-options", "--limit-items", "12", QKVD_MEMORY_BUDGET="1GiB")
    assert result.returncode == 0
    lines = {line.split(":")[0]: line for line in result.stdout.splitlines()}
    assert "12" in lines["limit-items"] and "flag" in lines["limit-items"]
    assert "environment" in lines["memory-budget"]


def test_print_metrics():
    result = qkvd("--print-metrics")
    assert result.returncode == 0
    assert all(line.startswith("qkvd_") for line in result.stdout.splitlines())
    assert len(result.stdout.splitlines()) > 10


@pytest.mark.parametrize("arguments,texts", [
    (["--memry-budget", "1GB"], ["--memry-budget", "did you mean --memory-budget"]),
    (["--memory-budget", "lots"], ["--memory-budget", "lots"]),
    (["--memory-budget"], ["--memory-budget"]),
    (["--memory-budget", "1"], ["--memory-budget", "1"]),
    (["--limit-items", "0"], ["--limit-items is 0", "1"]),
    (["--limit-items", "1.5"], ["--limit-items", "1.5"]),
    (["--bits-k", "5.1"], ["--bits-k is 5.1", "multiples of 0.125 up to 8"]),
    (["--drain-grace", "10parsecs"], ["--drain-grace", "10parsecs"]),
    (["--log-level", "loud"], ["--log-level is loud", "debug, info, warn"]),
    (["serve"], ["serve"]),
    (["--listen", "nonsense"], ["nonsense"]),
    (["--listen", "127.0.0.1:99999"], ["127.0.0.1:99999"]),
    (["--listen", "unix:/no/such/folder/qkvd.sock"], ["/no/such/folder/qkvd.sock"]),
    (["--config", "/no/such/file.yaml"], ["/no/such/file.yaml"]),
    (["--data-dir", "\udcff"], ["--data-dir is no UTF-8"]),  # the byte 0xff
])
def test_wrong_arguments(arguments, texts):
    result = qkvd(*arguments)
    assert result.returncode not in (0, -6, -11) and result.stdout == ""
    for text in texts:
        assert text in result.stderr, result.stderr


@pytest.mark.parametrize("content,texts", [
    ("listen: 127.0.0.1:0\n\nmemry-budget: 1GB\n", ["line 3", "memry-budget", "did you mean", "memory-budget"]),
    ("limit-items: many\n", ["line 1", "limit-items", "many"]),
    ("- a\n- b\n", ["line 1"]),
    ("limit-items: {a: b}\n", ["limit-items"]),
    ("limit-items: 'unfinished\n", ["line"]),
])
def test_wrong_files(tmp_path, content, texts):
    config = tmp_path / "qkvd.yaml"
    config.write_text(content)
    result = qkvd("--config", str(config))
    assert result.returncode not in (0, -6, -11)
    for text in ["qkvd.yaml", *texts]:
        assert text in result.stderr, result.stderr


def test_wrong_environment():
    result = qkvd(QKVD_LIMIT_ITEMS="none")
    assert result.returncode not in (0, -6, -11)
    assert "QKVD_LIMIT_ITEMS" in result.stderr and "none" in result.stderr


def test_addresses_in_use_are_refused():
    with Daemon() as daemon:
        for address in (daemon.tcp, daemon.target):
            result = qkvd("--listen", address)
            assert result.returncode not in (0, -6, -11)
            assert address.removeprefix("unix:") in result.stderr
            assert "another qkvd" in result.stderr
        # Refusing the second one has not harmed the first.
        assert daemon.status().state == "serving"
        assert os.path.exists(daemon.socket)


def cpus_of_pools(daemon):
    """How many processors each thread of a pool may run on."""
    tasks = pathlib.Path(f"/proc/{daemon.process.pid}/task").iterdir()
    return [len(os.sched_getaffinity(int(task.name))) for task in tasks
            if (task / "comm").read_text().strip() == "qkv-pool"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_compute_threads_keep_a_processor_each():
    with Daemon("--threads", "2", "--pin-threads") as daemon:
        assert cpus_of_pools(daemon).count(1) == 2
    with Daemon("--threads", "2") as daemon:
        assert cpus_of_pools(daemon).count(1) == 0


def test_log_is_json_lines():
    with Daemon("--log-level", "debug") as daemon:
        daemon.status()
        daemon.terminate()
        assert daemon.wait() == 0
        lines = [json.loads(line) for line in daemon.log_text().splitlines()]
    assert all({"time", "level", "message"} <= set(line) for line in lines)
    assert {"listening", "ready", "draining", "stopped"} <= {line["message"] for line in lines}
