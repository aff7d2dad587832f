"""Tests of frameworks are collected only where they are installed, so that none is ever skipped.

A file names its `PROGRAM`, the `CASES` of it that run on both libraries, and those `WITHOUT_TORCH`
that run on fullshard alone.
"""

from importlib.util import find_spec

import pytest
import torch

from tests.clients.clients import Run, run
from tests.support.hosts import reason_not_here

collect_ignore_glob = [] if find_spec("torchtitan") else ["test_*.py"]
collect_ignore = [] if torch.cuda.is_available() else ["test_torchtitan_trainer.py"]
if reason_not_here():  # Ray's nodes are hosts
    collect_ignore.append("test_ray.py")


@pytest.fixture(scope="module")
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    module = request.module
    return run(module.PROGRAM, tmp_path_factory.mktemp("torch"), *module.CASES, on="torch")


@pytest.fixture(scope="module")
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    module = request.module
    cases = [*module.CASES, *getattr(module, "WITHOUT_TORCH", ())]
    return run(module.PROGRAM, tmp_path_factory.mktemp("ours"), *cases, on="fullshard")
