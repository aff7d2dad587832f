"""What RL frameworks and others do with a model between steps: generate, move it, save it."""

import sys
from pathlib import Path
from typing import Any

import cases
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp._common_utils import _get_module_fsdp_state
from torch.distributed.fsdp._runtime_utils import _lazy_init
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

CPU = torch.device("cpu")


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return T5ForConditionalGeneration(T5Config(vocab_size=32, dropout_rate=0.0, **sizes, **ids))


def wrapped(use_orig_params: bool) -> Any:
    policy = ModuleWrapPolicy({T5Block})
    options = {"use_orig_params": use_orig_params, "device_id": CPU}
    return FullyShardedDataParallel(t5(), auto_wrap_policy=policy, **options)


def step(model: Any, number: int) -> torch.Tensor:
    """Train on one batch; return the loss."""
    tokens = cases.tokens(number, 2, 5)
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    return loss.detach()


def generating(use_orig_params: bool) -> Any:
    def case(folder: Path) -> Any:
        model = wrapped(use_orig_params)
        found = []
        for number in range(2):
            found.append(step(model, number))
            with (
                FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False),
                torch.no_grad(),
            ):
                tokens = cases.tokens(10 + number, 2, 5)
                found.append(
                    model.module.generate(
                        tokens, min_new_tokens=4, max_new_tokens=4, do_sample=False
                    )
                )
        return found

    return case


def moving(use_orig_params: bool) -> Any:
    """Copy flat parameters to the host and back, by the names that verl and others use."""

    def case(folder: Path) -> Any:
        model = wrapped(use_orig_params)
        found = [step(model, 0)]
        _lazy_init(model, model)
        assert _get_module_fsdp_state(model) is not None
        for handle in model._all_handles:
            flat = handle.flat_param
            assert not handle._offload_params
            assert flat._local_shard.data_ptr() == flat.data.data_ptr()
            handle.flat_param_to(CPU, non_blocking=True)
            flat._local_shard = flat.data
        return [*found, len(model._all_handles), step(model, 1), step(model, 2)]

    return case


def saved_in_the_background(folder: Path) -> Any:
    model = wrapped(use_orig_params=True)
    step(model, 0)
    kind = FullyShardedDataParallel.state_dict_type
    with kind(model, StateDictType.SHARDED_STATE_DICT):
        saving = dcp.async_save(model.state_dict(), checkpoint_id=folder)
    expected = [step(model, 1), step(model, 2)]
    saving.result()
    dist.barrier()
    with kind(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state)
    return expected, [step(model, 1), step(model, 2)]


def replicated(folder: Path) -> Any:
    model = replicate(t5(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return [step(model, number) for number in range(3)]


ALL = {
    "generating": generating(True),
    "generating_flat": generating(False),
    "moving": moving(True),
    "moving_flat": moving(False),
    "saved": saved_in_the_background,
    "replicated": replicated,
}

if __name__ == "__main__":
    sys.argv[2:] = sys.argv[2:] or list(ALL)
    dist.init_process_group("gloo")
    cases.run(ALL)
    dist.destroy_process_group()
