"""accelerate uses its FSDP plugin only where it finds GPUs: let it find some."""

from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType


def pretend_gpus() -> None:
    """Forget the last case. Ranks on CPUs get the plugin; nothing else of accelerate is changed."""

    def prepare_backend(self: PartialState, *args: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    def set_device(self: PartialState) -> None:
        self.device = torch.device("cpu")  # torch's wrapper does not take "cpu:0" for "cpu"

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._prepare_backend, PartialState.set_device = prepare_backend, set_device
