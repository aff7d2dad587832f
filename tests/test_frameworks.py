"""accelerate's plugins and the Trainer of transformers, with peft, on fullshard and on torch's.

The short form of `tests/clients`, which `make test-clients` runs with all frameworks.
"""

from pathlib import Path

from tests.clients.clients import PROGRAMS, assert_same, launch, run_in

# accelerate's, and with LoRA the Trainer's.
VARIANTS = ("fsdp1", "fsdp2", "fsdp2_bf16", "fsdp2_lora")


def test_frameworks_train_and_resume_on_fullshard_as_on_torchs_fsdp(tmp_path: Path) -> None:
    names = [*VARIANTS, *(f"resume_{variant}" for variant in VARIANTS)]
    printed = launch(tmp_path, str(PROGRAMS / "short.py"), str(tmp_path), *names)
    theirs, ours = (run_in(tmp_path / on, printed, on=on) for on in ("torch", "fullshard"))
    for name in names:
        assert_same(ours.found(name), theirs.found(name))
    for variant in VARIANTS:
        found = ours.found(variant)
        assert_same(ours.found(f"resume_{variant}"), found.get("then", found))
