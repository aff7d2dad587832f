"""torchtitan's models, parallelized, optimized, clipped and saved by torchtitan.

Its Trainer needs a GPU, so the loop here is its `train_step` without the parts that do.
"""

import sys
from pathlib import Path
from typing import Any

import cases
import titan_on_cpu  # noqa: F401  before torchtitan
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama
from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs
from torchtitan.models.qwen3.infra.parallelize import parallelize_qwen3

STEPS, SEQ_LEN = 3, 8
SIZES = {"dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 32, "max_seq_len": SEQ_LEN}


def config(**settings: Any) -> JobConfig:
    job = JobConfig()
    job.training.seq_len = SEQ_LEN
    job.training.mixed_precision_param = "float32"
    job.activation_checkpoint.mode = "none"
    job.optimizer.implementation = "for-loop"
    job.optimizer.lr = 1e-2
    for path, value in settings.items():
        section, name = path.split("__")
        setattr(getattr(job, section), name, value)
    return job


def built(job: JobConfig, tied: bool) -> tuple[nn.Module, ParallelDims]:
    parallel = job.parallelism
    dims = ParallelDims(
        dp_shard=parallel.data_parallel_shard_degree,
        dp_replicate=parallel.data_parallel_replicate_degree,
        cp=1,
        tp=parallel.tensor_parallel_degree,
        pp=1,
        ep=1,
        etp=1,
        world_size=cases.WORLD_SIZE,
    )
    with torch.device("meta"):
        if tied:
            arguments = Qwen3ModelArgs(
                **SIZES, head_dim=16, hidden_dim=64, n_kv_heads=2, enable_weight_tying=True
            )
            model: Any = Qwen3Model(arguments)
        else:
            model = Transformer(TransformerModelArgs(**SIZES, multiple_of=8))
    model = (parallelize_qwen3 if tied else parallelize_llama)(model, dims, job)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo cannot divide while it reduces, which torch's fully_shard otherwise asks for.
            module.set_force_sum_reduction_for_comms(True)
    return model.train(), dims


def train_steps(model: nn.Module, dims: ParallelDims, optimizers: Any, which: range) -> Any:
    losses, norms = [], []
    loss_parallel = dims.tp_enabled
    for step in which:
        optimizers.zero_grad()
        data_rank = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
        ids = torch.randint(
            0, 32, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(10 * step + data_rank)
        )
        num_tokens = 2 * SEQ_LEN * (dims.get_mesh("batch").size() if dims.dp_enabled else 1)
        with dist_utils.get_train_context(loss_parallel)():
            loss = cross_entropy_loss(model(ids[:, :-1]), ids[:, 1:]) / num_tokens
            loss.backward()
        norms.append(float(dist_utils.clip_grad_norm_(list(model.parameters()), 1.0)))
        optimizers.step()
        local = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        mean = local.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean))
    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "units": cases.num_units(model), "model": weights}


def train(tied: bool = False, **settings: Any) -> Any:
    def case(folder: Path) -> Any:
        job = config(**settings)
        model, dims = built(job, tied)
        optimizers = build_optimizers([model], job.optimizer, dims)
        first = train_steps(model, dims, optimizers, range(STEPS))
        state = {"model": ModelWrapper(model), "optimizer": optimizers}
        dcp.save(state, checkpoint_id=folder)
        return {"first": first, "then": train_steps(model, dims, optimizers, range(STEPS, 6))}

    return case


def load(tied: bool = False, **settings: Any) -> Any:
    """Load the checkpoint of the case beside this one, on any number of ranks."""

    def case(folder: Path) -> Any:
        job = config(**settings)
        torch.manual_seed(1)
        model, dims = built(job, tied)
        optimizers = build_optimizers([model], job.optimizer, dims)
        state = {"model": ModelWrapper(model), "optimizer": optimizers}
        first = folder.with_name(folder.name.removeprefix("load_"))
        dcp.load(state, checkpoint_id=first)
        if cases.WORLD_SIZE > 1:
            return train_steps(model, dims, optimizers, range(STEPS, 6))
        values = {**model.state_dict(), **optimizers.state_dict()}
        return {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in values.items()
            if isinstance(value, torch.Tensor)
        }

    return case


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"training__mixed_precision_param": "bfloat16"},
    "kept": {"parallelism__fsdp_reshard_after_forward": "never"},
    "tied": {"tied": True},
    "checkpointed": {"activation_checkpoint__mode": "full"},
    "selective": {"activation_checkpoint__mode": "selective"},
    "selective_ops": {
        "activation_checkpoint__mode": "selective",
        "activation_checkpoint__selective_ac_option": "op",
    },
    "compiled": {"compile__enable": True, "compile__backend": "aot_eager"},
    "compiled_selective_ops": {
        "compile__enable": True,
        "compile__backend": "aot_eager",
        "activation_checkpoint__mode": "selective",
        "activation_checkpoint__selective_ac_option": "op",
    },
    # On four ranks.
    "hybrid": {"parallelism__data_parallel_replicate_degree": 2},
    "tensor_parallel": {"parallelism__tensor_parallel_degree": 2},
}
ALL = {
    name: make(**settings)
    for form, make in (("{}", train), ("load_{}", load))
    for variant, settings in VARIANTS.items()
    for name in [form.format(variant)]
}

if __name__ == "__main__":
    sys.argv[2:] = sys.argv[2:] or list(ALL)
    dist.init_process_group("gloo")
    cases.run(ALL)
    dist.destroy_process_group()
