"""On NCCL, where the device waits and not the program, all other ranks name a rank that fails."""

from pathlib import Path

import pytest

from fullshard.testing import RankPool
from tests.comm.test_watcher import FAULTS, require_named


@pytest.mark.parametrize(("kind", "phase", "api", "found"), FAULTS)
def test_a_rank_that_fails_is_named_on_all_others(
    kind: str,
    phase: str,
    api: str,
    found: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")  # the program lives to see an error
    with RankPool(3, "nccl", timeout_s=100) as ranks:
        require_named(ranks, kind, phase, api, found, tmp_path)
