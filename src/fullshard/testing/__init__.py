"""Public test helpers: ranks that start once, simulated worlds, and training parity.

    from fullshard.testing import Rank, Training, assert_same_training, on_ranks

    @on_ranks(2, 4)
    def test_my_model_trains_alike(rank: Rank) -> None:
        mesh = rank.mesh(rank.size)
        assert_same_training(MyModel, lambda m: fully_shard(m, mesh=mesh), Training(my_batch))

`on_ranks` needs pytest; everything else needs torch only.
"""

from fullshard.testing.failures import RankException, RanksFailed
from fullshard.testing.parity import Trained, Training, assert_same_training
from fullshard.testing.rank_pool import RankPool, on_ranks, pool
from fullshard.testing.rank_process import Rank
from fullshard.testing.simulated import fake_world, quiet_world

__all__ = [
    "Rank",
    "RankException",
    "RankPool",
    "RanksFailed",
    "Trained",
    "Training",
    "assert_same_training",
    "fake_world",
    "on_ranks",
    "pool",
    "quiet_world",
]
