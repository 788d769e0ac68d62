"""The configurations of the README, as far as they can be checked without an engine; the engines' own tests use them."""

import importlib.util
import os

from readme import TARGET, configuration, python_example

from qkvd.prefixes import Options


def check(module, name, settings):
    """The class is in the module, and the settings are known."""
    with open(
        os.path.join(os.path.dirname(importlib.util.find_spec("qkvd").origin), module.removeprefix("qkvd.") + ".py")
    ) as file:
        assert f"\nclass {name}(" in file.read()
    assert Options.of(settings).target == TARGET


def test_vllm():
    made = configuration("--kv-transfer-config")
    assert made["kv_role"] == "kv_both"
    check(made["kv_connector_module_path"], made["kv_connector"], made["kv_connector_extra_config"])


def test_lmcache():
    made = configuration("--l2-adapter")
    settings = made["adapter_params"]
    assert made["type"] == "plugin" and settings.pop("kv_heads") == 8
    check(made["module_path"], made["class_name"], settings)


def test_sglang():
    made = configuration("--hicache-storage-backend-extra-config")
    check(made["module_path"], made["class_name"], {"target": made["target"]})


def test_transformers():
    compile(python_example(), "README.md", "exec")
    assert f'QkvdCache("{TARGET}", model)' in python_example()
