"""The Helm chart without a cluster: lint, values that the schema refuses, and what is rendered of many values against the
API's schemas of two Kubernetes versions; qkvd itself reads the configuration that pods get.

Started by tests/deploy/chart.sh, which installs what it needs.
"""

import argparse
import pathlib
import subprocess
import tempfile

import helm_python as helm
import kubernetes_validate
import yaml

CHART = pathlib.Path(__file__).resolve().parents[2] / "deploy/helm/qkvd"
VERSIONS = ("1.28", "1.32")
GOOD = {
    "defaults": {},
    "daemonset": {"kind": "DaemonSet"},
    "memory alone": {"storage": {"enabled": False}},
    "daemonset in memory alone": {"kind": "DaemonSet", "storage": {"enabled": False}},
    "three replicas": {"replicas": 3, "podDisruptionBudget": {"maxUnavailable": "34%"}},
    "no policies": {"networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}},
    "storage class": {"storage": {"storageClassName": "fast", "size": "1Ti"}},
    "huge pages": {"resources": {"hugepages-2Mi": "4Gi"}, "memoryBudgetMiB": 3500},
    "options": {"options": {"bits": 3, "limit-sessions": 1000, "low-rank": "auto", "keep-full": True,
                            "calibrate-skip": ["a", "b"]}, "drainGraceSeconds": 30, "port": 9000},
    "placed": {"nodeSelector": {"pool": "kv"}, "tolerations": [{"key": "kv", "operator": "Exists"}],
               "podAnnotations": {"a": "b"}, "imagePullSecrets": [{"name": "s"}],
               "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
                   {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"a": "b"}}}]}},
               "seccompProfile": {"type": "Localhost", "localhostProfile": "qkvd.json"},
               "networkPolicy": {"from": [{"podSelector": {"matchLabels": {"app": "worker"}}}]}},
}
BAD = {
    "a kind that is none": {"kind": "Deployment"},
    "a value that is none": {"memoryBudget": 4},
    "a budget of nothing": {"memoryBudgetMiB": 0},
    "a size without a unit": {"storage": {"size": "100"}},
    "an option that has a value of its own": {"options": {"memory-budget": "1GiB"}},
    "a port beyond all": {"port": 65536},
    "no replica": {"replicas": 0},
}


def documents(rendered):
    for path, text in rendered.items():
        if not path.endswith(".txt"):
            yield from (each for each in yaml.safe_load_all(text) if each)


def check_manifests(name, found):
    for document in found:
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                raise SystemExit(f"{name}: {document['kind']} for {version}: {error.message}") from None


def check_configuration(name, found, qkvd):
    """What pods get, as the daemon reads it."""
    text = next(each for each in found if each["kind"] == "ConfigMap")["data"]["qkvd.yaml"]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        result = subprocess.run([qkvd, "--config", file.name, "--print-options"], capture_output=True, text=True)
    assert result.returncode == 0, f"{name}: qkvd refuses the configuration: {result.stderr}"


def megabytes(quantity):
    return int(quantity.removesuffix("Mi"))


def check_pod(name, found, values):
    workload = next(each for each in found if each["kind"] in ("StatefulSet", "DaemonSet"))
    pod = workload["spec"]["template"]["spec"]
    container = pod["containers"][0]
    budget = values["memoryBudgetMiB"]
    assert megabytes(container["resources"]["limits"]["memory"]) >= budget * 1.1 + 200, f"{name}: the limit is too low"
    assert pod["terminationGracePeriodSeconds"] > values["drainGraceSeconds"] + 50, f"{name}: killed while it drains"
    assert container["securityContext"]["readOnlyRootFilesystem"] and pod["securityContext"]["runAsNonRoot"]
    kinds = sorted(each["kind"] for each in found)
    assert kinds.count("Service") == (2 if values["kind"] == "StatefulSet" else 1), f"{name}: {kinds}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--qkvd", required=True, help="the daemon's program")
    qkvd = parser.parse_args().qkvd
    report = helm.lint(str(CHART), strict=True, quiet=True)
    assert not report["errors"] and not [each for each in report["messages"] if each["severity"] > 1], report
    with helm.Chart.load(str(CHART)) as chart:
        for name, values in GOOD.items():
            chart.validate_schema(chart.merge_values(values))
            found = list(documents(chart.render(values, name="kv", namespace="test")))
            check_manifests(name, found)
            check_configuration(name, found, qkvd)
            check_pod(name, found, chart.merge_values(values))
        for name, values in BAD.items():
            try:
                chart.validate_schema(chart.merge_values(values))
            except helm.HelmValuesError:
                continue
            raise SystemExit(f"the schema takes {name}")
    print(f"chart: {len(GOOD)} sets of values for Kubernetes {' and '.join(VERSIONS)}, {len(BAD)} refused")


if __name__ == "__main__":
    main()
