"""accelerate's plugins and the Trainer of transformers, with peft, on fullshard and on torch's.

The short form of `tests/clients`, which `make test-clients` runs with all frameworks.
"""

from pathlib import Path

from tests.clients.clients import assert_same, run

# accelerate's, and with LoRA the Trainer's.
VARIANTS = ("fsdp1", "fsdp2", "fsdp2_bf16", "fsdp2_lora")


def test_frameworks_train_and_resume_on_fullshard_as_on_torchs_fsdp(tmp_path: Path) -> None:
    names = [*VARIANTS, *(f"resume_{variant}" for variant in VARIANTS)]
    theirs = run("short.py", tmp_path / "torch", *names, on="torch")
    ours = run("short.py", tmp_path / "ours", *names, on="fullshard")
    for name in names:
        assert_same(ours.found(name), theirs.found(name))
    for variant in VARIANTS:
        found = ours.found(variant)
        assert_same(ours.found(f"resume_{variant}"), found.get("then", found))
