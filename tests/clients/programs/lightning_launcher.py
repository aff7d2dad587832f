"""Lightning starts the second rank itself. Every rank says which library it trains on."""

import sys
from pathlib import Path

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader


# Without a GPU, Lightning refuses its own FSDPStrategy but not classes derived from it.
class FSDPOnCPU(FSDPStrategy):
    pass


class Regression(LightningModule):
    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net = nn.Linear(8, 8)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=FSDPOnCPU(use_orig_params=True),
        max_steps=2,
        enable_checkpointing=False,
        **quiet,
    )
    batches = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    trainer.fit(Regression(), DataLoader(batches, batch_size=2))
    rank = f"{trainer.global_rank} of {trainer.world_size}"
    (folder / f"rank_{trainer.global_rank}").write_text(
        f"{FullyShardedDataParallel.__module__}, rank {rank}, step {trainer.global_step}"
    )
