"""Programs that are written for torch's FSDP run on fullshard without a change."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from click.testing import CliRunner
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_helpers
from torch.distributed.fsdp import FSDPModule as TorchModule
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper
from torch.distributed.pipelining import schedules

import fullshard
from fullshard import dropin
from fullshard.cli.commands import fullshard as command
from fullshard.comm import guard
from fullshard.errors import DisagreementError
from fullshard.testing import Rank, RankPool, on_ranks
from tests.support.programs import free_port
from tests.support.wrapped import Net, batch_of

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group("gloo")
# Ranks have told each other that they run on fullshard.
store = dist.distributed_c10d._get_default_store()
assert store.check([f"fullshard/dropin/{dist.get_rank()}"])
def wrap(model):
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))

for shard in (fully_shard, wrap):
    torch.manual_seed(0)
    model = shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    optimizer.step()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    found = (dist.get_world_size(), isinstance(model, (FSDP, FSDPModule)), fully_shard.__module__,
             sorted(state), round(loss.item(), 4), sys.argv[1:])
    sys.stdout.write(" ".join(map(str, found)) + "\\n")
dist.destroy_process_group()
"""
TRAINED = "{} True {} ['0.bias', '0.weight', '1.bias', '1.weight'] -0.4912 ['--lr', '0.1']\n" * 2


def outcome(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_command(rank: Rank, port: int, *arguments: str) -> str:
    """The output of `fullshard run`, in a process that has loaded torch and ours."""
    dist.destroy_process_group()
    if rank.size > 1:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    return CliRunner().invoke(command, ["run", *arguments], catch_exceptions=False).stdout


@pytest.mark.exhaustive
@pytest.mark.long
def test_a_program_runs_unchanged_on_one_rank_and_on_two(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    arguments = (str(program), "--lr", "0.1")
    ours = fullshard.fully_shard.__module__
    for num_ranks in (1, 2):
        expected = TRAINED.format(num_ranks, ours, num_ranks, ours)
        with RankPool(num_ranks) as ranks:
            assert ranks.run(run_command, free_port(), *arguments) == [expected] * num_ranks
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1")
    found = outcome(*torchrun, "--standalone", "-m", "fullshard.dropin", *arguments)
    assert found == TRAINED.format(1, ours, 1, ours)


CHILDREN = """
import os, subprocess, sys
import torch
import torch.multiprocessing as mp

def join():
    # Nothing is imported from torch's FSDP yet, as in a rank that is late.
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store = dist.distributed_c10d._get_default_store()
    assert store.check(["fullshard/dropin/0"])
    dist.destroy_process_group()

def child(number, *_):
    if number:
        join()
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    names = (FullyShardedDataParallel, fully_shard, ModuleWrapPolicy)
    assert all(name.__module__.startswith("fullshard") for name in names), names
    sys.stdout.write(f"child {number}\\n")

if __name__ == "__main__":
    if sys.argv[1:]:
        child(*sys.argv[1:])
    else:
        child(0)
        sys.stdout.flush()
        mp.spawn(child, nprocs=1)
        mp.start_processes(child, (1,), nprocs=1, start_method="forkserver")
        subprocess.run([sys.executable, __file__, "2"], check=True)
"""


@pytest.mark.exhaustive
def test_processes_that_a_program_starts_are_redirected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "children.py"
    program.write_text(CHILDREN)
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.stdout.write('own ')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    found = outcome(sys.executable, "-m", "fullshard.dropin", str(program))
    expected = ["child 0", "child 0", "child 0", "child 2"]
    assert found.replace("own ", "").splitlines() == expected
    assert found.count("own ") > 1  # what it hides is loaded, too


def test_what_is_no_program_is_a_sentence() -> None:
    with pytest.raises(SystemExit, match=r"pass a program, as in train.py"):
        dropin.run([])
    with pytest.raises(SystemExit, match=r"there is no file missing\.py; pass a program"):
        dropin.run(["missing.py", "--lr", "1"])


def test_names_are_replaced_wherever_they_are_bound_and_put_back() -> None:
    before = {name: getattr(torch_fsdp, name) for name in torch_fsdp.__all__}
    with dropin.installed():
        assert torch_fsdp.FullyShardedDataParallel is fullshard.FullyShardedDataParallel
        assert torch_fsdp.wrap.ModuleWrapPolicy is fullshard.wrap.ModuleWrapPolicy
        assert torch_fsdp.api.StateDictType is fullshard.StateDictType
        assert torch_helpers.StateDictType is fullshard.StateDictType
        assert schedules.FSDPModule is fullshard.FSDPModule
        assert TorchWrapper is fullshard.FullyShardedDataParallel
        dropin.install()
        with dropin.installed():
            pass
        assert torch_fsdp.fully_shard is fullshard.fully_shard
    assert {name: getattr(torch_fsdp, name) for name in torch_fsdp.__all__} == before
    assert schedules.FSDPModule is before["FSDPModule"]
    assert TorchWrapper is before["FullyShardedDataParallel"]
    assert fullshard.FullyShardedDataParallel is not TorchWrapper
    dropin.uninstall()
    assert torch_fsdp.fully_shard is before["fully_shard"]


def test_a_module_imported_while_it_is_installed_gets_torchs_names_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_user.py").write_text("from torch.distributed.fsdp import fully_shard\n")
    monkeypatch.syspath_prepend(tmp_path)
    with dropin.installed():
        import late_user  # type: ignore[import-not-found]

        assert late_user.fully_shard is fullshard.fully_shard
    assert late_user.fully_shard is torch_fsdp.fully_shard
    del sys.modules["late_user"]


@on_ranks(2)
def test_torchs_replicate_of_fsdp_stays_torchs(rank: Rank) -> None:
    base = TorchModule
    with dropin.installed():
        from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate

        assert issubclass(ReplicateModule, base)
        model = replicate(Net(), mesh=rank.mesh())
        assert isinstance(model, ReplicateModule)
        reference, batch = Net(), batch_of(0, rank.rank)
        for param, whole in zip(model.parameters(), reference.parameters(), strict=True):
            whole.data = param.to_local().clone()
        for each in (model, reference):
            each(batch).sum().backward()
        for param, whole in zip(model.parameters(), reference.parameters(), strict=True):
            dist.all_reduce(whole.grad, dist.ReduceOp.SUM)
            torch.testing.assert_close(param.grad.to_local(), whole.grad / rank.size)


@on_ranks(2)
def test_flat_parameters_move_by_the_names_that_rl_frameworks_read(rank: Rank) -> None:
    with dropin.installed():
        from torch.distributed.fsdp._common_utils import _get_module_fsdp_state
        from torch.distributed.fsdp._runtime_utils import _lazy_init

        for use_orig_params in (False, True):
            net = Net()
            net.head = TorchWrapper(net.head, use_orig_params=use_orig_params)
            model = TorchWrapper(net, use_orig_params=use_orig_params)
            model(batch_of(0, rank.rank)).sum().backward()
            expected = model(batch_of(0, rank.rank))
            assert _lazy_init(model, model) is model
            assert model._is_root
            assert _get_module_fsdp_state(model) is model
            assert _get_module_fsdp_state(nn.Linear(1, 1)) is None
            assert [handle.flat_param for handle in model._all_handles] == [
                model._flat_param,
                net.head._flat_param,
            ]
            for handle in model._all_handles:
                assert not handle._offload_params
                flat = handle.flat_param
                assert flat._local_shard.data_ptr() == flat.data.data_ptr()
                handle.flat_param_to(torch.device("cpu"), non_blocking=True)
                flat._local_shard = flat.data
            torch.testing.assert_close(model(batch_of(0, rank.rank)), expected)


@on_ranks(2)
def test_instances_of_ours_are_instances_of_torchs_names(rank: Rank) -> None:
    with dropin.installed():
        wrapped = torch_fsdp.FullyShardedDataParallel(Net())
        sharded = torch_fsdp.fully_shard(Net())
        assert isinstance(wrapped, TorchWrapper)
        assert isinstance(sharded, torch_fsdp.FSDPModule)
        for model in (wrapped, sharded):
            model(batch_of(0, rank.rank)).sum().backward()
            assert all(param.grad is not None for param in model.parameters() if param.numel())
    assert not isinstance(wrapped, TorchWrapper)


@on_ranks(2)
def test_a_rank_that_runs_on_torchs_fsdp_is_named_in_the_first_step(rank: Rank) -> None:
    model = torch_fsdp.fully_shard(Net(), mesh=rank.mesh())
    dist.barrier()
    if rank.rank == 0:
        os.environ[guard.PATIENCE] = "0.2"
        with dropin.installed():
            model = torch_fsdp.fully_shard(Net(), mesh=rank.mesh())
            with pytest.raises(DisagreementError, match=r"ranks \[1\] have not said that they run"):
                model(batch_of(0, 0))
        del os.environ[guard.PATIENCE]
    dist.barrier()
    with dropin.installed():
        torch_fsdp.fully_shard(Net(), mesh=rank.mesh())(batch_of(0, 0)).sum().backward()
