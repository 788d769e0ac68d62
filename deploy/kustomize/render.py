#!/usr/bin/env python3
"""Writes deploy/kustomize/base from the Helm chart: a StatefulSet whose tokens are the secret qkvd-tokens,
and whose certificate is the secret qkvd-tls.

Usage: deploy/kustomize/render.py [--out DIR]. Needs helm-python-sdk and PyYAML; tests/deploy/chart.sh has both, and compares.
"""

import argparse
import pathlib

import helm_python as helm
import yaml

HERE = pathlib.Path(__file__).resolve().parent
VALUES = {"auth": {"secretName": "qkvd-tokens"}, "tls": {"secretName": "qkvd-tls"}, "kubeVersion": "1.30"}
OF_HELM = ("helm.sh/chart", "app.kubernetes.io/managed-by")
HEAD = "# Made by deploy/kustomize/render.py from deploy/helm/qkvd.\n"


def without_helm(value):
    """The same without the labels that only Helm has a use for, and without the checksum of a file that is patched."""
    if isinstance(value, dict):
        return {key: without_helm(one) for key, one in value.items() if key not in (*OF_HELM, "checksum/config")}
    if isinstance(value, list):
        return [without_helm(one) for one in value]
    return value


def documents():
    with helm.Chart.load(str(HERE.parent / "helm/qkvd")) as chart:
        rendered = chart.render(VALUES, name="qkvd", namespace="default")
    for path, text in sorted(rendered.items()):
        if not path.endswith(".txt"):
            yield from (without_helm(each) for each in yaml.safe_load_all(text) if each)


def files():
    """Names and texts of what the base consists of."""
    made = {}
    for document in documents():
        name = f"{document['kind'].lower()}-{document['metadata']['name']}.yaml"
        assert name not in made
        made[name] = HEAD + yaml.safe_dump(document, sort_keys=False, width=120)
    kustomization = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": sorted(made)}
    made["kustomization.yaml"] = HEAD + yaml.safe_dump(kustomization, sort_keys=False)
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "base", help="where the files go")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (out / name).write_text(text)


if __name__ == "__main__":
    main()
