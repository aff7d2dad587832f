"""Replicas of NCCL ranks on one GPU, some of which are killed."""

from dataclasses import replace

import pytest

from tests.comm.test_elastic import SCENARIOS, check, said_by
from tests.support.elastic_replicas import Scenario


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(3, 1, "fully_shard", {"2": (1, "before"), "4": (0, "reducing")}, 6),
        Scenario(2, 2, "wrapper", {"2": (0, "reduced"), "4": (1, "averaged")}, 6),
        SCENARIOS[-1],
    ],
)
def test_replicas_killed_on_a_gpu_leave_the_losses_of_those_that_are_left(
    scenario: Scenario,
) -> None:
    check(scenario, *said_by([replace(scenario, device="cuda")]))
