"""What the README tells users to write, for tests to do just that."""

import json
import os
import re

README = os.path.join(os.path.dirname(__file__), "..", "..", "..", "README.md")
TARGET = "unix:/run/qkvd.sock"  # that its examples have


def in_an_engine():
    """The section on engines."""
    with open(README) as file:
        return re.search(r"^## In an engine\n(.*?)^## ", file.read(), re.DOTALL | re.MULTILINE)[1]


def configuration(option):
    """The JSON that an engine's option has there."""
    return json.loads(re.search(option + r" '(.*?)'", in_an_engine(), re.DOTALL)[1])


def python_example():
    """The lines for transformers."""
    return re.search(r"```python\n(.*?)```", in_an_engine(), re.DOTALL)[1]
