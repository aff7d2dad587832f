"""Tests of frameworks are collected only where they are installed, so that none is ever skipped."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torchtitan") else ["test_*.py"]
