"""Private names of torch: in one file, checked when the package is imported."""

import ast
from pathlib import Path

import pytest

from fullshard import _torch
from tests.support.programs import outcome_of_forks

SOURCE = Path(__file__).parents[2] / "src" / "fullshard"
# Names that a class of ours may have, too, or that `nn.Module` has without a public form.
ATTRIBUTES = {
    "_allgather_base",
    "_base",
    "_cdata",
    "_concatenate",
    "_device_types",
    "_flatten",
    "_get_backend",
    "_get_scale_async",
    "_local_tensor",
    "_optimizer_step_post_hooks",
    "_reduce_scatter_base",
    "_spec",
    "_step_supports_amp_scaling",
    "_use_count",
    "_values",
    "_version",
}


def private_names(path: Path) -> list[str]:
    """Imports from private modules of torch, and attributes that only torch's objects have."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [name for name in names if name.startswith("_")]
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names for part in alias.name.split(".")]
            found += [p for p in parts if parts[0] == "torch" and p.startswith("_")]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            if node.attr.startswith("__"):
                continue
            owner = ast.unparse(node.value)
            is_torch = owner.split(".")[0] in ("torch", "dist")
            is_own = owner.split(".")[0] in ("self", "cls")
            if is_torch or (node.attr in ATTRIBUTES and not is_own):
                found.append(f"{owner}.{node.attr}")
    return found


def test_private_names_of_torch_are_in_one_file() -> None:
    found = {path.name: private_names(path) for path in SOURCE.rglob("*.py")}
    assert [name for name, names in found.items() if names] == ["_torch.py"], found


def test_all_listed_names_exist() -> None:
    assert [name for name in _torch.__all__ if not hasattr(_torch, name)] == []
    assert len(set(_torch.__all__)) == len(_torch.__all__)


MISSING = [
    ("torch._C._autograd", "_get_sequence_nr"),
    ("torch.distributed.tensor._dtensor_spec", "DTensorSpec"),
    ("torch", "_foreach_copy_"),
    ("torch.amp.grad_scaler.GradScaler", "_unscale_grads_"),
]


@pytest.mark.exhaustive
def test_a_missing_name_is_an_import_error_that_names_torch() -> None:
    refused = [
        f"delattr(pkgutil.resolve_name({owner!r}), {name!r})\n"
        "try:\n    from fullshard import fully_shard\n"
        "except ImportError as error:\n"
        f"    assert torch.__version__ in str(error) and {name!r} in str(error), error\n"
        f"    print({name!r})\n"
        for owner, name in MISSING
    ]
    printed = outcome_of_forks("import pkgutil, torch, torch.distributed.tensor", *refused)
    assert printed.splitlines() == [name for _, name in MISSING]


def test_a_missing_name_of_a_module_that_is_loaded_late_says_so_when_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(_torch._LOADED_LATE, "FakeStore", ("torch.distributed", "NoSuchStore"))
    with pytest.raises(ImportError, match="NoSuchStore"):
        _ = _torch.FakeStore
