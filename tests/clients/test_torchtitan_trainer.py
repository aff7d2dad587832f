"""torchtitan's Trainer, its command unchanged, trains on fullshard as on torch's fully_shard.

It needs a GPU, which all ranks share: to NCCL, each rank seems to be on its own host.
"""

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

LIBRARIES = {"torch": (), "fullshard": ("-m", "fullshard.dropin")}
# What a variant adds to the command, and on how many ranks.
PLAIN = ("--activation_checkpoint.mode", "none")
VARIANTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "plain": (2, PLAIN),
    "full checkpointing": (2, ("--activation_checkpoint.mode", "full")),
    "selective checkpointing": (2, ("--activation_checkpoint.mode", "selective")),
    "compiled": (2, (*PLAIN, "--compile.enable")),
    "hybrid": (
        4,
        (
            *(*PLAIN, "--parallelism.data_parallel_replicate_degree", "2"),
            *("--parallelism.data_parallel_shard_degree", "2"),
        ),
    ),
    "tensor parallel": (4, (*PLAIN, "--parallelism.tensor_parallel_degree", "2")),
}
METRICS = re.compile(r"step: +(\d+) +loss: +([\d.]+) +grad_norm: +([\d.]+)")


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of words and a dataset of them, which torchtitan reads from folders."""
    folder = tmp_path_factory.mktemp("assets")
    words = {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<unk>": 2}
    words |= {f"w{number}": 3 + number for number in range(500)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "data").mkdir()
    texts = (" ".join(f"w{n * k * k % 499}" for k in range(300)) for n in range(1, 300))
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    (folder / "data" / "data.json").write_text(lines)
    return folder


def trained(
    assets: Path, folder: Path, library: str, num_ranks: int, *options: str
) -> dict[int, tuple[float, float]]:
    """Run torchtitan's command; the loss and the gradient norm of each step."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    command = [sys.executable, *LIBRARIES[library], "-m", "torchtitan.train"]
    command += ["--model.flavor", "debugmodel", "--model.hf_assets_path", str(assets)]
    command += ["--training.dataset_path", str(assets / "data"), "--training.seq_len", "128"]
    command += ["--training.local_batch_size", "4", "--training.steps", "6"]
    command += ["--lr_scheduler.warmup_steps", "2", "--metrics.log_freq", "1"]
    command += ["--metrics.disable_color_printing", "--debug.seed", "0"]
    command += ["--experimental.custom_import", "tests.clients.programs.say_library"]
    command += ["--job.dump_folder", str(folder), *options]
    shared = {"WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0", "MASTER_PORT": port}
    shared |= {"MASTER_ADDR": "127.0.0.1", "NCCL_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    shared |= {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "huggingface")}
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "NCCL_HOSTID": f"host{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    printed = [process.communicate(timeout=300)[0] for process in processes]
    for process, text in zip(processes, printed, strict=True):
        assert process.returncode == 0, text[-5000:]
    assert f"fully_shard is of {library}" in printed[0]
    found = METRICS.findall(printed[0])
    return {int(step): (float(loss), float(norm)) for step, loss, norm in found}


def test_trainers_losses_and_norms_are_torchs(assets: Path, tmp_path: Path) -> None:
    def run(variant: str, library: str) -> dict[int, tuple[float, float]]:
        num_ranks, options = VARIANTS[variant]
        return trained(assets, tmp_path / library / variant, library, num_ranks, *options)

    with ThreadPoolExecutor(3) as pool:
        runs = {(v, name): pool.submit(run, v, name) for v in VARIANTS for name in LIBRARIES}
        found = {key: each.result() for key, each in runs.items()}
    for variant in VARIANTS:
        ours, theirs = (found[variant, name] for name in ("fullshard", "torch"))
        assert len(theirs) == 6
        for step, metrics in theirs.items():
            assert ours[step] == pytest.approx(metrics, rel=2e-2), (variant, step)
        assert ours[6][0] < ours[1][0]


def test_a_checkpoint_of_two_ranks_resumes_on_one_and_in_the_other_library(
    assets: Path, tmp_path: Path
) -> None:
    saving = (*PLAIN, "--checkpoint.enable", "--checkpoint.interval", "3")
    last = trained(assets, tmp_path, "fullshard", 2, *saving, "--training.global_batch_size", "8")
    later = (*saving, "--checkpoint.load_step", "3", "--training.global_batch_size", "8")
    # The dataloader's position is per rank: one rank reads other data than two do.
    for library in LIBRARIES:
        alone = trained(
            assets, tmp_path, library, 1, *later, "--checkpoint.exclude_from_loading", "dataloader"
        )
        assert sorted(alone) == [4, 5, 6]
        assert alone[4][0] < last[1][0]
