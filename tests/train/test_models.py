"""Built-in models: their sizes, their values on any ranks, their adapters, tokens and samples."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.comm.placement import full_tensor
from fullshard.errors import ConfigError, UnknownNameError
from fullshard.runtime.names import clean_name
from fullshard.state.materialize import give_memory
from fullshard.testing import Rank, on_ranks, pool
from fullshard.wrap import ModuleWrapPolicy
from fullshard_train.models import architecture_of
from fullshard_train.models.adapters import LoraSettings
from fullshard_train.models.architecture import Architecture
from fullshard_train.models.document_attention import attend, documents_of, mask_of_offsets
from fullshard_train.models.float8 import use_float8
from fullshard_train.models.sampling import sample
from fullshard_train.models.tokenizers import ByteTokenizer
from fullshard_train.models.transformer import (
    SIZES,
    Block,
    BuiltinArchitecture,
    KVCache,
    Size,
    Transformer,
    rotary_angles,
    rotated,
    size_named,
)

SMALL = Size(
    name="small",
    vocabulary=264,
    width=24,
    num_blocks=2,
    num_heads=6,
    num_kv_heads=2,
    mlp_width=40,
    rope_theta=10_000.0,
    max_sequence=16,
)
# The embedding is drawn in more than one piece, and no dim is a multiple of the ranks.
UNEVEN = dataclasses.replace(
    SMALL, vocabulary=175_001, num_heads=3, num_kv_heads=1, mlp_width=37, is_tied=False
)
LORA = LoraSettings(rank=3, alpha=6.0)
APIS = ["fully_shard", "wrapper"]
CPU = torch.device("cpu")


def filled(architecture: Architecture, seed: int = 0) -> nn.Module:
    """In one process, unsharded."""
    model = architecture.build()
    give_memory(model)  # `to_empty` would untie what is tied
    architecture.fill(model, seed)
    return model


def sharded(rank: Rank, architecture: Architecture, api: str, seed: int = 0) -> nn.Module:
    model = architecture.build()
    if api == "wrapper":
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy(set(architecture.block_classes())),
            param_init_fn=lambda module: module.to_empty(device="cpu", recurse=False),
            use_orig_params=True,
        )
    else:
        for module in model.modules():
            if isinstance(module, architecture.block_classes()):
                fully_shard(module, mesh=rank.mesh())
        fully_shard(model, mesh=rank.mesh())
        give_memory(model)
    architecture.fill(model, seed)
    return model


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The full parameters of a model, sharded or not, by their names in the model as written."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return {clean_name(n): p.detach().clone() for n, p in model.named_parameters()}
    return {
        name: (full_tensor(p) if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, **(tolerance or {"rtol": 0, "atol": 0}), msg=lambda m, n=name: n + m
        )


def loss_of(architecture: Architecture, model: nn.Module, step: int) -> Tensor:
    """On the same tokens on every rank, so that the world does not matter."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 50, (2, 9), generator=generator)
    return architecture.loss(model, tokens[:, :-1], tokens[:, 1:]) / 16


def train(architecture: Architecture, model: nn.Module, steps: int = 3) -> list[float]:
    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.5, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = loss_of(architecture, model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# Sizes.


def test_a_size_is_as_large_as_its_name_says() -> None:
    millions = {"tiny": 1, "10m": 10, "30m": 30, "150m": 150, "350m": 350, "3b": 3200}
    for name in SIZES:
        model = architecture_of(name).build()
        assert all(param.is_meta for param in model.parameters())
        numel = sum(param.numel() for param in model.parameters())
        if name in millions:
            assert numel == pytest.approx(millions[name] * 1e6, rel=0.05)
        assert name != "8b" or numel == 8_030_261_248  # as Llama 3


def test_what_is_no_size_and_no_folder_is_answered_with_what_was_expected(tmp_path: Any) -> None:
    for name, meant in {"10M": "10m", "tinny": "tiny", "80b": "8b"}.items():
        with pytest.raises(UnknownNameError, match=f"did you mean {meant!r}"):
            architecture_of(name)
    for name in ("./models/llama", "llama.gguf", "meta/llama-3"):
        with pytest.raises(UnknownNameError, match="in Hugging Face's layout"):
            size_named(name)
    (tmp_path / "weights").write_text("")
    with pytest.raises(UnknownNameError, match="is a file"):
        architecture_of(str(tmp_path / "weights"))


# The model.


# Dynamo looks at `.grad` of what it is given.
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("how", ["compiled", "recomputed"])
@on_ranks(1)
def test_a_block_computes_the_same_compiled_or_recomputed(rank: Rank, how: str) -> None:
    architecture = BuiltinArchitecture(SMALL)
    expected = train(architecture, filled(architecture))
    model = filled(architecture)
    assert isinstance(model, Transformer)
    for block in model.model.layers:
        assert isinstance(block, Block)
        forward: Any = block.forward
        if how == "compiled":
            block.forward = torch.compile(forward, backend="aot_eager", fullgraph=True)
        else:
            block.forward = lambda *args, forward=forward: checkpoint(
                forward, *args, use_reentrant=False
            )
    fully_shard(model, mesh=rank.mesh())
    assert train(architecture, model) == pytest.approx(expected, rel=1e-5)
    assert len(drawn(architecture, model)) == 30


@settings(deadline=None, max_examples=25)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 8),
    begins=st.sets(st.integers(0, 23)),
)
def test_offsets_of_documents_are_their_mask(batch: int, length: int, begins: set[int]) -> None:
    starts = sorted({n for n in begins if n < batch * length} | {*range(0, batch * length, length)})
    positions = torch.tensor(
        [n - max(start for start in starts if start <= n) for n in range(batch * length)]
    ).view(batch, length)
    offsets = torch.tensor([*starts, batch * length], dtype=torch.int32)
    expected = documents_of(positions)
    assert expected is not None
    assert torch.equal(mask_of_offsets(offsets, batch, length), expected)
    # In float32, attention takes both.
    queries, keys, values = torch.randn(3, batch, 2, length, 4).unbind()
    found = [attend(queries, keys, values, each) for each in (offsets, expected)]
    assert torch.equal(*found)


def test_late_positions_are_turned_exactly_in_low_precision() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    angles = rotary_angles(5000, 4, 8, 10_000.0, CPU)
    found = rotated(x, angles.cos(), angles.sin())
    assert found.dtype == torch.bfloat16
    pairs = torch.complex(*x.double().chunk(2, dim=-1))
    exact = torch.outer(torch.arange(5000, 5004).double(), 10_000.0 ** -(torch.arange(4) / 4.0))
    turned = pairs * torch.polar(torch.ones_like(exact), exact)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=5e-3)


@settings(deadline=None, max_examples=25)
@given(cuts=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_tokens_read_in_parts_give_the_logits_of_the_whole(cuts: list[int]) -> None:
    torch.manual_seed(0)
    model = Transformer(SMALL)
    tokens = torch.arange(sum(cuts))[None] * 7 % 256
    past, parts = KVCache(), tokens.split(cuts, dim=1)
    with torch.no_grad():
        found = torch.cat([model(part, past) for part in parts], dim=1)
        torch.testing.assert_close(found, model(tokens))


# First values.


def test_first_values_follow_the_rule() -> None:
    size = dataclasses.replace(SMALL, width=96, mlp_width=200, num_blocks=8)
    values = whole(filled(BuiltinArchitecture(size)))
    for name, value in values.items():
        if name.endswith("norm.weight"):
            assert torch.equal(value, torch.ones(96))
            continue
        is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert value.std().item() == pytest.approx(0.005 if is_residual else 0.02, rel=0.05), name
        assert abs(value.mean().item()) < 4 * value.std().item() / value.numel() ** 0.5


def test_first_values_follow_from_the_seed_and_differ_between_parameters() -> None:
    architecture = BuiltinArchitecture(SMALL)
    one, again, other = (whole(filled(architecture, seed)) for seed in (1, 1, 2))
    assert_same(again, one)
    matrices = [name for name, value in one.items() if value.dim() == 2]
    assert not any(torch.equal(one[name], other[name]) for name in matrices)
    ups = [one[f"model.layers.{block}.mlp.up_proj.weight"] for block in range(2)]
    assert not torch.equal(*ups)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("api", APIS)
@on_ranks(1, 2, 4)
def test_first_values_are_the_same_on_any_ranks_and_train_alike(rank: Rank, api: str) -> None:
    for size in (SMALL, UNEVEN):
        architecture = BuiltinArchitecture(size)
        reference, model = filled(architecture), sharded(rank, architecture, api)
        assert_same(whole(model), whole(reference))
    architecture = BuiltinArchitecture(SMALL)
    reference, model = filled(architecture), sharded(rank, architecture, api)
    assert train(architecture, model) == pytest.approx(train(architecture, reference), rel=1e-5)
    assert_same(whole(model), whole(reference), rtol=1e-4, atol=1e-5)


# Adapters.


@pytest.mark.sampled(2)
@pytest.mark.parametrize("api", APIS)
@on_ranks(2)
def test_only_adapters_are_trained(rank: Rank, api: str) -> None:
    plain, architecture = BuiltinArchitecture(SMALL), BuiltinArchitecture(SMALL, LORA)
    reference, model = filled(architecture), sharded(rank, architecture, api)
    before = whole(model)
    base = {n.replace(".base_layer", ""): v for n, v in before.items() if "lora" not in n}
    assert_same(base, whole(filled(plain)))

    losses = train(architecture, model)
    assert losses == pytest.approx(train(architecture, reference), rel=1e-5)
    after = whole(model)
    assert_same(after, whole(reference), rtol=1e-4, atol=1e-6)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {name for name in after if "lora" in name}


@pytest.mark.exhaustive
def test_every_linear_layer_but_the_head_gets_an_adapter() -> None:
    for size in (SMALL, UNEVEN):
        model = BuiltinArchitecture(size, LORA).build()
        names = {name for name, param in model.named_parameters() if param.requires_grad}
        assert len(names) == 2 * 7 * size.num_blocks
        assert not any("head" in name or "embed" in name for name in names)
        assert all(param.is_meta for param in model.parameters())
    plain, architecture = BuiltinArchitecture(SMALL), BuiltinArchitecture(SMALL, LORA)
    tokens = torch.arange(12)[None]
    found = architecture.logits(filled(architecture), tokens)  # adapters add nothing at first
    assert torch.equal(found, plain.logits(filled(plain), tokens))


def test_adapters_go_where_they_are_asked_for() -> None:
    settings = LoraSettings(2, 4.0, ("q_proj", "layers.1.mlp.up_proj"))
    model = BuiltinArchitecture(SMALL, settings).build()
    names = {name for name, param in model.named_parameters() if param.requires_grad}
    assert {name.partition(".lora_")[0] for name in names} == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }
    for target in ("query", "proj", "embed_tokens"):
        with pytest.raises(ConfigError, match=rf"{target!r}; choose among down_proj, .*, v_proj"):
            BuiltinArchitecture(SMALL, LoraSettings(2, 4.0, (target,))).build()


def test_adapters_without_peft_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'fullshard\[lora\]'"):
        BuiltinArchitecture(SMALL, LORA).build()


def test_float8_without_torchao_or_its_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = __import__("sys").modules
    monkeypatch.setitem(modules, "torchao.float8", None)
    refused = pytest.raises(ConfigError, match=r"--precision fp8: .* 'fullshard\[torchao\]'")
    with refused:
        use_float8(BuiltinArchitecture(SMALL).build(), (Block,), "fp8", CPU, gathers=False)


# Tokens.


@settings(deadline=None)
@given(st.text())
def test_bytes_give_back_their_text(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert all(0 <= token < tokenizer.end for token in tokens)
    assert tokenizer.decode(tokens) == text


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([104, 105, tokenizer.end, 0xFF, 263]) == "hi\N{REPLACEMENT CHARACTER}"
    assert tokenizer.encode("a\ud800b") == [97, 63, 98]


def test_a_built_in_model_reads_bytes() -> None:
    architecture = architecture_of("tiny")
    for kind in ("auto", "bytes"):
        tokenizer = architecture.tokenizer(kind)
        assert isinstance(tokenizer, ByteTokenizer)
        assert tokenizer.vocabulary == tokenizer.end + 1 <= architecture.vocabulary
    with pytest.raises(ConfigError, match="no tokenizer of its own"):
        architecture.tokenizer("model")


# Samples.

PROMPT = [5, 6, 7]


def drawn(architecture: Architecture, model: nn.Module, num_tokens: int = 30, **o: Any) -> Any:
    options = {"temperature": 0.8, "top_k": 20, "seed": 3, "end": -1, "device": CPU, **o}
    prompt = options.pop("prompt", PROMPT)
    return sample(architecture, model, prompt, num_tokens, **options)


def drawn_on_a_rank(rank: Rank, api: str) -> list[int]:
    architecture = BuiltinArchitecture(SMALL)
    return drawn(architecture, sharded(rank, architecture, api))


@pytest.mark.parametrize("api", APIS)
def test_a_sample_is_the_same_on_any_ranks(api: str) -> None:
    architecture = BuiltinArchitecture(SMALL)
    expected = drawn(architecture, filled(architecture))
    assert len(expected) == 30  # longer than the window
    for size in (1, 2):
        assert pool(size).run(drawn_on_a_rank, api=api) == [expected] * size


def test_a_sample_is_what_full_windows_give() -> None:
    architecture = BuiltinArchitecture(SMALL)
    model = filled(architecture)
    for temperature in (0.0, 1.0):
        kept = drawn(architecture, model, temperature=temperature)
        plain = drawn(_Forgetful(SMALL), model, temperature=temperature)
        assert kept == plain


class _Forgetful(BuiltinArchitecture):
    """Computes every window from its beginning."""

    def next_token_logits(self, model: nn.Module) -> Any:
        return Architecture.next_token_logits(self, model)


def test_a_greedy_sample_takes_the_likeliest_token() -> None:
    architecture = BuiltinArchitecture(SMALL)
    model = filled(architecture)
    found = drawn(architecture, model, 4, temperature=0.0)
    assert found == drawn(architecture, model, 4, temperature=0.0, seed=99)
    logits = architecture.logits(model, torch.tensor([PROMPT + found[:-1]]))[0, len(PROMPT) - 1 :]
    assert found == logits.argmax(-1).tolist()
    assert found == drawn(architecture, model, 4, temperature=1.0, top_k=1)


def test_a_sample_depends_on_its_seed_and_ends_where_it_should() -> None:
    architecture = BuiltinArchitecture(SMALL)
    model = filled(architecture).train()
    found = drawn(architecture, model, top_k=0)
    assert model.training
    assert found != drawn(architecture, model, top_k=0, seed=4)
    end = found[10]
    assert drawn(architecture, model, top_k=0, end=end) == found[: found.index(end)]
    assert drawn(architecture, model, 0) == drawn(architecture, model, within_s=0.0) == []


def test_a_sample_without_a_prompt_begins_a_document() -> None:
    architecture = BuiltinArchitecture(SMALL)
    model = filled(architecture)
    found = drawn(architecture, model, 5, prompt=[], end=256)
    assert found == drawn(architecture, model, 5, prompt=[256], end=256)
