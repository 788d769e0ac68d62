"""Builds the extension; everything else is in pyproject.toml."""

from setuptools import setup

setup(cffi_modules=["build_qkv.py:builder"])
