"""Models of folders in Hugging Face's layout, judged by transformers and peft themselves."""

import dataclasses
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import tokenizers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.cli.commands import fullshard
from fullshard.errors import ConfigError
from fullshard.state import export_safetensors, load, load_safetensors, save
from fullshard.state.shards import tensor_shards
from fullshard.testing import Rank, on_ranks, pool
from fullshard_train.config import ModelSection, TrainConfig
from fullshard_train.config_file import config_as_toml
from fullshard_train.corpus import prepare_corpus, unmarked
from fullshard_train.generation import find_checkpoint
from fullshard_train.models import architecture_of
from fullshard_train.models.adapters import LoraSettings
from fullshard_train.models.architecture import Architecture
from fullshard_train.models.quantized import FORMATS
from fullshard_train.models.sampling import sample
from fullshard_train.models.tokenizers import ByteTokenizer, FolderTokenizer
from fullshard_train.models.transformer import BuiltinArchitecture
from fullshard_train.sharding import architecture_for
from fullshard_train.sources import Documents
from tests.train.test_models import (
    APIS,
    CPU,
    SMALL,
    UNEVEN,
    assert_same,
    filled,
    sharded,
    train,
    whole,
)

LORA = LoraSettings(rank=3, alpha=6.0)
TEXT = "def hello(world): return world"
TOKENS = torch.arange(12)[None] * 7 % 250


def llama(size: Any = SMALL, **options: Any) -> Any:
    """The config of a built-in size."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.num_blocks,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        intermediate_size=size.mlp_width,
        max_position_embeddings=size.max_sequence,
        rms_norm_eps=size.norm_eps,
        tie_word_embeddings=size.is_tied,
        rope_parameters={"rope_type": "default", "rope_theta": size.rope_theta},
        **options,
    )


def gpt2() -> Any:
    import transformers

    return transformers.GPT2Config(
        vocab_size=260, n_embd=24, n_layer=2, n_head=3, n_positions=16, resid_pdrop=0.5
    )


def scaled() -> Any:
    import transformers

    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    }
    return transformers.LlamaConfig(**{**llama().to_dict(), "rope_parameters": rope})


KINDS = {"llama": lambda: llama(dataclasses.replace(SMALL, is_tied=False)), "tied": llama}
KINDS |= {"gpt2": gpt2, "scaled": scaled}


def saved(folder: Path, config: Any, dtype: torch.dtype = torch.float32) -> Path:
    import transformers

    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)  # norms and biases, too
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


def original(folder: Path) -> nn.Module:
    import transformers

    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind."""
    base = tmp_path_factory.mktemp("folders")
    return {kind: saved(base / kind, config()) for kind, config in KINDS.items()}


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders["llama"]


# The built-in transformer against Llama.


@pytest.mark.parametrize("size", [SMALL, UNEVEN], ids=["tied", "untied"])
def test_the_built_in_transformer_computes_what_llama_does(size: Any, tmp_path: Path) -> None:
    size = dataclasses.replace(size, vocabulary=300)
    architecture = BuiltinArchitecture(size)
    model = filled(architecture)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(4.0)  # so that attention is far from even
    export_safetensors(tmp_path / "exported", model)
    llama(size).save_pretrained(tmp_path / "exported")
    with torch.no_grad():
        expected = original(tmp_path / "exported")(TOKENS).logits
        found = architecture.logits(model, TOKENS)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# Folders.


@on_ranks(2)
def test_a_folder_streams_into_shards(rank: Rank, folders: dict[str, Path]) -> None:
    for kind, folder in folders.items():
        architecture = architecture_of(str(folder))
        with torch.no_grad():
            expected = original(folder)(TOKENS).logits
            for api in APIS:
                found = architecture.logits(sharded(rank, architecture, api).eval(), TOKENS)
                torch.testing.assert_close(
                    found, expected, rtol=1e-5, atol=1e-6, msg=lambda m, k=kind: f"{k}: {m}"
                )


def test_a_folder_says_what_its_model_is(folders: dict[str, Path]) -> None:
    for kind, folder in folders.items():
        architecture = architecture_of(str(folder))
        assert architecture.name == str(folder)
        assert architecture.vocabulary == KINDS[kind]().vocab_size
        assert architecture.max_sequence == 16
        blocks = [each.__name__ for each in architecture.block_classes()]
        assert blocks == ["GPT2Block" if kind == "gpt2" else "LlamaDecoderLayer"]
        model = architecture.build()
        assert all(param.is_meta for param in model.parameters())
        assert model.config.use_cache is False
        ties = {id(param) for param in model.parameters()}
        assert len(ties) == sum(1 for _ in original(folder).parameters())


def test_a_folder_of_low_precision_is_trained_in_float32(tmp_path: Path) -> None:
    folder = saved(tmp_path / "low", llama(), torch.bfloat16)
    assert {each.dtype for each in load_of(folder).values()} == {torch.bfloat16}
    model = filled(architecture_of(str(folder)))
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert_same(whole(model), {n: p.detach() for n, p in original(folder).named_parameters()})


def test_packed_documents_do_not_see_each_other(folders: dict[str, Path]) -> None:
    packed = TOKENS[:, :9]
    positions = torch.tensor([[0, 1, 2, 3, 0, 0, 1, 2, 3]])
    kinds = [architecture_of(str(folder)) for folder in folders.values()]
    for architecture in (*kinds, BuiltinArchitecture(SMALL)):
        model = filled(architecture).eval()
        with torch.no_grad():
            found = architecture.logits(model, packed, positions)
            alone = [architecture.logits(model, each) for each in packed.split([4, 1, 4], dim=1)]
            together = architecture.logits(model, packed)
        torch.testing.assert_close(found, torch.cat(alone, dim=1), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(found, together, atol=1e-3)


def granite() -> Any:
    """A config of a model that divides its logits."""
    import transformers

    return transformers.GraniteConfig(**{**llama().to_dict(), "logits_scaling": 3.0})


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapters"])
def test_the_loss_without_logits_is_that_of_the_logits(
    folders: dict[str, Path], tmp_path: Path, lora: Any
) -> None:
    scaled = saved(tmp_path / "scaled", granite())
    kinds = [architecture_of(str(folder), lora) for folder in (*folders.values(), scaled)]
    targets = (TOKENS + 1).masked_fill(TOKENS % 3 == 0, -100)
    is_plain = {}
    for architecture in (*kinds, BuiltinArchitecture(SMALL, lora)):
        model = filled(architecture).eval()
        trained = [param for param in model.parameters() if param.requires_grad]
        logits, seen = architecture.logits(model, TOKENS), []
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        head.register_forward_hook(lambda *called, seen=seen: seen.append(called[-1].ndim))
        found = architecture.loss(model, TOKENS, targets)
        expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        grads = (
            torch.autograd.grad(each, trained, retain_graph=True) for each in (found, expected)
        )
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
        is_plain[architecture.name] = seen == [0]
    assert [name for name, plain in is_plain.items() if not plain] == [str(scaled)]


def test_a_sample_of_a_folder_is_what_transformers_generates(folder: Path) -> None:
    architecture = architecture_of(str(folder))
    found = sample(
        architecture,
        filled(architecture),
        [1, 2, 3],
        8,
        temperature=0.0,
        top_k=0,
        seed=0,
        end=-1,
        device=CPU,
    )
    prompt = torch.tensor([[1, 2, 3]])
    expected = original(folder).generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert found == expected[0, 3:].tolist()


@pytest.mark.parametrize("kind", ["gpt2", "tied"])
@on_ranks(2)
def test_a_sharded_folder_is_sampled_with_a_cache_as_without_one(
    rank: Rank, folders: dict[str, Path], kind: str
) -> None:
    architecture = architecture_of(str(folders[kind]))
    architecture.max_sequence = 12
    model = sharded(rank, architecture, "fully_shard").eval()
    lengths: list[int] = []
    model.get_input_embeddings().register_forward_hook(  # type: ignore[operator]
        lambda _, args, output: lengths.append(args[0].shape[-1])
    )
    options: Any = {"temperature": 0.8, "top_k": 0, "seed": 1, "end": -1, "device": CPU}
    found = sample(architecture, model, [1, 2, 3], 11, **options)
    assert lengths == [3, *[1] * 9, 12]  # then the window moves
    type(architecture).next_token_logits, own = (
        Architecture.next_token_logits,
        type(architecture).next_token_logits,
    )
    try:
        assert sample(architecture, model, [1, 2, 3], 11, **options) == found
    finally:
        type(architecture).next_token_logits = own  # type: ignore[method-assign]


def load_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def copied(folder: Path, to: Path, *, weights: dict[str, torch.Tensor] | None) -> Path:
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    if weights is not None:
        save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_names_that_a_model_ignores_may_be_in_its_files(folder: Path, tmp_path: Path) -> None:
    weights = {**load_of(folder), "model.rotary_emb.inv_freq": torch.zeros(2)}
    architecture = architecture_of(str(copied(folder, tmp_path / "more", weights=weights)))
    assert_same(whole(filled(architecture)), whole(filled(architecture_of(str(folder)))))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"model.norm.weight": None}, "missing in the files: model.norm.weight"),
        ({"model.other.weight": torch.zeros(2)}, "not in the model: model.other.weight"),
        (
            {"model.norm.weight": torch.zeros(7)},
            r"model.norm.weight: its shape is \[24\], but \[7\]",
        ),
    ],
    ids=["missing", "unexpected", "misfit"],
)
@pytest.mark.parametrize("lora", [None, LORA], ids=["plain", "lora"])
def test_files_of_another_model_are_refused(
    folder: Path, tmp_path: Path, change: dict[str, Any], said: str, lora: LoraSettings | None
) -> None:
    weights = {k: v for k, v in {**load_of(folder), **change}.items() if v is not None}
    architecture = architecture_of(str(copied(folder, tmp_path / "f", weights=weights)), lora)
    with pytest.raises(ConfigError, match=said):
        filled(architecture)


def test_a_folder_without_config_or_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=r"the folder has no config\.json"):
        architecture_of(str(empty))
    with pytest.raises(ConfigError, match="the folder has no weights as safetensors"):
        architecture_of(str(copied(folder, tmp_path / "unweighted", weights=None)))


def test_a_config_that_cannot_be_used_is_refused_in_a_sentence(
    folder: Path, tmp_path: Path
) -> None:
    broken = copied(folder, tmp_path / "broken", weights=load_of(folder))
    unreadable = ["{", "[]", '{"model_type": "no such"}', "{}"]
    for text in (*unreadable, '{"model_type": "vit"}', '{"model_type": "t5"}'):
        (broken / "config.json").write_text(text)
        words = "cannot read its config" if text in unreadable else "is not a causal language model"
        with pytest.raises(ConfigError, match=words) as raised:
            architecture_of(str(broken)).build()
        assert "\n" not in str(raised.value)


def test_a_folder_without_transformers_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'fullshard\[huggingface\]'"):
        architecture_of(str(folder))


# Adapters.


@on_ranks(2)
def test_adapters_train_as_pefts_own(rank: Rank, folders: dict[str, Path]) -> None:
    import peft  # takes seconds

    for kind, api in (("llama", "fully_shard"), ("tied", "fully_shard"), ("tied", "wrapper")):
        architecture = architecture_of(str(folders[kind]), LORA)
        model = sharded(rank, architecture, api)
        before = whole(model)
        reference = peft.get_peft_model(
            original(folders[kind]).train(),
            peft.LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear"),
        )
        named = {f"base_model.model.{name}": value for name, value in before.items()}
        assert reference.load_state_dict(named, strict=False).unexpected_keys == []

        losses = train(architecture, model)
        assert losses == pytest.approx(train(architecture, reference), rel=1e-5)
        after = whole(model)
        expected = {n.removeprefix("base_model.model."): p for n, p in reference.named_parameters()}
        assert_same(after, {n: p.detach() for n, p in expected.items()}, rtol=1e-4, atol=1e-6)
        changed = {name for name in after if not torch.equal(after[name], before[name])}
        assert changed == {name for name in after if "lora" in name}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_view = any(each.alias_info is not None for each in func._schema.returns)
        if isinstance(found, torch.Tensor) and not is_view and not found.is_meta:
            self.now += found.nbytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(found, self._free, found.nbytes)
        return found

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


@pytest.mark.parametrize("base", ["int8", "nf4"])
@on_ranks(2)
def test_a_rank_quantizes_its_rows_of_a_frozen_base(rank: Rank, tmp_path: Path, base: str) -> None:
    size = dataclasses.replace(SMALL, width=192, mlp_width=320, num_blocks=6)
    if rank.rank == 0:
        saved(tmp_path, llama(size))
    dist.barrier()
    plain, architecture = (
        architecture_of(str(tmp_path), dataclasses.replace(LORA, base=each))
        for each in ("plain", base)
    )
    weights = whole(filled(plain))
    reference = filled(architecture)
    expected, losses = whole(reference), train(architecture, reference)
    assert losses == pytest.approx(train(plain, filled(plain)), rel=1e-3 if base == "int8" else 0.1)
    frozen = {name: value for name, value in expected.items() if value.dtype is torch.uint8}
    assert len(frozen) == 7 * size.num_blocks
    full_bytes = 0
    for name, packed in frozen.items():
        value = weights[name.replace("packed", "weight")]
        found = FORMATS[base].unpack(packed, value.shape[1], torch.float32)
        assert (found - value).norm() < (0.01 if base == "int8" else 0.11) * value.norm()
        full_bytes += value.nbytes
    assert (
        sum(value.nbytes for value in frozen.values())
        < full_bytes * {"int8": 0.26, "nf4": 0.14}[base]
    )
    for api in APIS:
        with LiveBytes() as live:
            model = sharded(rank, architecture, api)
        packed_bytes = sum(
            shard.shape.numel() for shard in tensor_shards(model) if shard.dtype is torch.uint8
        )
        assert live.peak < packed_bytes / 2 + full_bytes / 3, api
        assert_same({n: v for n, v in whole(model).items() if n in frozen}, frozen)
        assert train(architecture, model) == pytest.approx(losses, rel=1e-5)
        assert_same({n: v for n, v in whole(model).items() if n in frozen}, frozen)


@pytest.mark.parametrize(
    "change, said",
    [
        (None, "missing in the files: model.layers.1.mlp.up_proj.weight"),
        (torch.zeros(7, 24), r"up_proj.weight: its shape is \[40, 24\], but \[7, 24\]"),
        (torch.zeros(40, 24, dtype=torch.int8), "torch.int8, which is not quantized"),
    ],
    ids=["missing", "misfit", "codes"],
)
def test_files_without_a_weight_that_can_be_quantized_are_refused(
    folder: Path, tmp_path: Path, change: Any, said: str
) -> None:
    weights = {**load_of(folder), "model.layers.1.mlp.up_proj.weight": change}
    weights = {name: value for name, value in weights.items() if value is not None}
    made = copied(folder, tmp_path / "f", weights=weights)
    with pytest.raises(ConfigError, match=said):
        filled(architecture_of(str(made), dataclasses.replace(LORA, base="int8")))


def test_transposed_layers_are_quantized_where_rows_consist_of_blocks(
    folders: dict[str, Path],
) -> None:
    quantized = dataclasses.replace(LORA, base="int8")
    own, exact = (architecture_of(str(folders["gpt2"]), each) for each in (quantized, LORA))
    model, plain = filled(own).eval(), filled(exact).eval()
    assert sum(param.dtype is torch.uint8 for param in model.parameters()) == 2 * 4
    found, expected = own.logits(model, TOKENS), exact.logits(plain, TOKENS)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)
    with pytest.raises(ConfigError, match=r"--lora-base nf4: .* multiples of 64 elements"):
        architecture_of(str(folders["llama"]), dataclasses.replace(LORA, base="nf4")).build()


def test_first_adapters_are_drawn_as_peft_does(folders: dict[str, Path]) -> None:
    settings = LoraSettings(64, 6.0)
    values, again = (
        {n: v for n, v in whole(filled(architecture)).items() if "lora" in n}
        for architecture in [architecture_of(str(folders["llama"]), settings)] * 2
    )
    assert_same(again, values)
    for name, value in values.items():
        if ".lora_B." in name:
            assert not value.any()
        else:
            bound = value.shape[1] ** -0.5
            assert value.abs().max() <= bound
            assert value.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    # Layers that are no nn.Linear get adapters too.
    model = filled(architecture_of(str(folders["gpt2"]), LORA))
    names = {n.partition(".lora_")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert len(names) == 2 * 4
    with torch.no_grad():
        found = model.eval()(TOKENS).logits
        torch.testing.assert_close(found, original(folders["gpt2"])(TOKENS).logits)
    with pytest.raises(ConfigError, match=r"'c_attn'; choose among down_proj, .*, v_proj"):
        architecture_of(str(folders["llama"]), LoraSettings(2, 4.0, ("c_attn",))).build()


# Tokenizers.


def write_tokenizer(folder: Path, words: int = 40, **options: Any) -> None:
    import transformers

    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=words,
        special_tokens=["<end>"],
        show_progress=False,
    )
    model.train_from_iterator([TEXT] * 3, trainer)
    own = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, **{"eos_token": "<end>", "model_max_length": 4, **options}
    )
    own.save_pretrained(folder)


@pytest.fixture
def with_tokenizer(folder: Path, tmp_path: Path) -> Path:
    made = copied(folder, tmp_path / "with tokenizer", weights=load_of(folder))
    write_tokenizer(made)
    return made


@pytest.mark.parametrize("kind", ["auto", "model"])
def test_a_folder_with_a_tokenizer_reads_with_it(with_tokenizer: Path, kind: str) -> None:
    tokenizer = architecture_of(str(with_tokenizer)).tokenizer(kind)
    assert isinstance(tokenizer, FolderTokenizer)
    tokens = tokenizer.encode(TEXT)
    assert len(tokens) < len(TEXT)
    assert tokenizer.end not in tokens
    assert max(tokens) < tokenizer.vocabulary
    assert tokenizer.decode([*tokens, tokenizer.end]) == TEXT


def test_a_conversation_is_rendered_by_the_template_of_the_tokenizer(tmp_path: Path) -> None:
    """Or by ours, which an exported tokenizer of bytes has, too."""
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<end>{% endfor %}"
    template += "{% if add_generation_prompt %}a:{% endif %}"
    write_tokenizer(tmp_path / "own", chat_template=template)
    write_tokenizer(tmp_path / "none")
    (tmp_path / "bytes").mkdir()
    ByteTokenizer().save(tmp_path / "bytes")
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    own = FolderTokenizer(tmp_path / "own")
    assert own.render(messages, is_prompt=False) == "u:hello<end>a:world<end>"
    assert own.render(messages[:1], is_prompt=True) == "u:hello<end>a:"
    for name in ("none", "bytes"):
        found = FolderTokenizer(tmp_path / name)
        for some, is_prompt in ((messages, False), (messages[:1], True)):
            expected = ByteTokenizer().render(some, is_prompt=is_prompt)
            assert found.render(some, is_prompt=is_prompt) == expected
    # The template ends the document by itself.
    line = json.dumps({"messages": messages})
    (tmp_path / "chats.jsonl").write_text(f"{line}\n{line}\n")
    documents = Documents.of([str(tmp_path / "chats.jsonl")], "text")
    corpus = prepare_corpus(documents, own, tmp_path, vocabulary=own.vocabulary)
    corpus.folder.clean()
    (shard,) = corpus.window(0, 2).shards
    tokens, is_trained, _ = unmarked(shard.row(0, shard.tokens.numel() - 1)[None])
    assert tokens[0].eq(own.end).sum() == 4
    assert own.decode(tokens[is_trained].tolist()) == "worldworld"
    write_tokenizer(tmp_path / "strict", chat_template="{{ raise_exception('no system') }}")
    with pytest.raises(ConfigError, match="no system"):
        FolderTokenizer(tmp_path / "strict").render(messages, is_prompt=True)


def test_the_fingerprint_of_a_tokenizer_follows_its_files(tmp_path: Path) -> None:
    fingerprints = []
    for name, words in [("a", 40), ("b", 40), ("c", 22)]:
        write_tokenizer(tmp_path / name, words)
        fingerprints.append(FolderTokenizer(tmp_path / name).fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    assert fingerprints[0] != ByteTokenizer().fingerprint


def test_a_folder_without_a_tokenizer_reads_bytes(folder: Path, tmp_path: Path) -> None:
    architecture = architecture_of(str(folder))
    assert isinstance(architecture.tokenizer("auto"), ByteTokenizer)
    with pytest.raises(ConfigError, match="the folder has no tokenizer files"):
        architecture.tokenizer("model")
    few = dataclasses.replace(SMALL, vocabulary=100)
    architecture = architecture_of(str(saved(tmp_path / "few", llama(few))))
    with pytest.raises(
        ConfigError,
        match=r"vocabulary of 100 is too small for the tokenizer .bytes., which has 257",
    ):
        architecture.tokenizer("auto")


def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "endless", eos_token=None)
    with pytest.raises(ConfigError, match="no token that ends a text"):
        FolderTokenizer(tmp_path / "endless")
    write_tokenizer(tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="transformers cannot read the tokenizer files"):
        FolderTokenizer(tmp_path / "broken")


# Exports.


def save_runs(rank: Rank, folder: Path, runs: dict[str, tuple[dict[str, Any], str]]) -> None:
    """The folders of runs: a model, and the API by which it was sharded."""
    for name, (model_keys, api) in runs.items():
        config = TrainConfig(model=ModelSection(**model_keys))
        architecture = architecture_for(config.model)
        model = sharded(rank, architecture, api)
        with torch.no_grad():
            for shard in tensor_shards(model):
                for part in shard.local_parts(shard.tensor):
                    part.values.add_(0.01 if shard.is_trainable else 0.0)
        if rank.rank == 0:
            (folder / name).mkdir()
            (folder / name / "config.toml").write_text(config_as_toml(config))
        only = "trainable" if config.model.lora_rank else None
        save(folder / name / "checkpoints" / "step_3", model, step=3, only=only)


def checkpoint_command(*args: Any) -> str:
    result = CliRunner().invoke(fullshard, ["checkpoint", *map(str, args)])
    assert result.exit_code == 0, result.output
    return result.stdout


def ours(run: Path) -> tuple[Architecture, nn.Module]:
    """The model of a run, unsharded."""
    path, config = find_checkpoint(run)
    architecture = architecture_for(config.model)
    model = filled(architecture)
    load(path, model, random_state=False)
    return architecture, model.eval()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_an_exported_run_opens_in_transformers_and_generates_what_we_do(
    with_tokenizer: Path, tmp_path: Path
) -> None:
    import transformers  # takes seconds

    settings = json.loads((with_tokenizer / "config.json").read_text())
    settings.pop("dtype", None)
    # The dtype of the files; an export in float32 must not be opened in it.
    (with_tokenizer / "config.json").write_text(json.dumps({**settings, "torch_dtype": "bfloat16"}))
    runs = {
        "tied": ({"name": "tiny"}, "fully_shard"),
        "wrapped": ({"name": "tiny"}, "wrapper"),
        "folder": ({"name": str(with_tokenizer)}, "fully_shard"),
    }
    pool(2).run(save_runs, tmp_path, runs)
    prompt = "def hello"
    for name in runs:
        run, out = tmp_path / name, tmp_path / f"{name} exported"
        assert "weights only" not in checkpoint_command("export", run, out)
        files = {path.name for path in out.iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
        reader = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
        architecture, model = ours(run)
        tokenizer = architecture.tokenizer("auto")
        tokens = tokenizer.encode(prompt)
        assert reader(prompt, add_special_tokens=False).input_ids == tokens
        assert reader.eos_token_id == tokenizer.end
        with torch.no_grad():
            found = theirs.eval()(torch.tensor([tokens])).logits
            expected = architecture.logits(model, torch.tensor([tokens]))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        whole_prompt = torch.tensor([tokens])
        new = theirs.generate(
            whole_prompt, attention_mask=torch.ones_like(whole_prompt), max_new_tokens=4,
            do_sample=False, pad_token_id=tokenizer.end,
        )[0, len(tokens) :].tolist()  # fmt: skip
        options = {"temperature": 0.0, "top_k": 0, "seed": 0, "end": tokenizer.end, "device": CPU}
        expected_new = sample(architecture, model, tokens, 4, **options)
        assert [token for token in new if token != tokenizer.end] == expected_new
        assert reader.decode(new, skip_special_tokens=True) == tokenizer.decode(expected_new)
    low = checkpoint_command("export", tmp_path / "tied", tmp_path / "low", "--dtype", "bfloat16")
    assert "1 file" in low
    assert (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "low").dtype is torch.bfloat16
    )
    # The other commands take the folder of a run, too.
    assert "step_3: complete" in checkpoint_command("verify", tmp_path / "tied")
    assert "step_3" in checkpoint_command("info", tmp_path / "tied" / "checkpoints")


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_exported_adapters_open_in_peft_and_merge_into_a_model(
    with_tokenizer: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    import peft  # takes seconds
    import transformers

    transposed = copied(folders["gpt2"], tmp_path / "gpt2", weights=load_of(folders["gpt2"]))
    runs = {
        "adapted": ({"name": str(with_tokenizer), "lora_rank": 3}, "fully_shard"),
        "transposed": ({"name": str(transposed), "lora_rank": 2}, "fully_shard"),
        "built-in": ({"name": "tiny", "lora_rank": 2, "lora_targets": ("q_proj",)}, "fully_shard"),
    }
    pool(2).run(save_runs, tmp_path, runs)
    for name in runs:
        architecture, model = ours(tmp_path / name)
        with torch.no_grad():
            expected = architecture.logits(model, TOKENS[:, :9])
        adapter, merged = tmp_path / f"{name} adapter", tmp_path / f"{name} merged"
        checkpoint_command("export", tmp_path / name, adapter)
        checkpoint_command("export", tmp_path / name, merged, "--merge")
        found = transformers.AutoModelForCausalLM.from_pretrained(merged, local_files_only=True)
        with torch.no_grad():
            logits = found.eval()(TOKENS[:, :9]).logits
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
            if name == "built-in":
                continue  # drawn from a seed: there is no folder of the model without adapters
            settings = peft.PeftConfig.from_pretrained(adapter)
            base = original(Path(settings.base_model_name_or_path))
            assert not torch.allclose(base(TOKENS[:, :9]).logits, expected, atol=1e-3)
            logits = peft.PeftModel.from_pretrained(base, adapter).eval()(TOKENS[:, :9]).logits
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
            own = peft.AutoPeftModelForCausalLM.from_pretrained(adapter, local_files_only=True)
            assert set(load_of(adapter)) == {
                n.replace(".default.", ".") for n, _ in own.named_parameters() if "lora_" in n
            }
    refusal = CliRunner().invoke(
        fullshard, ["checkpoint", "export", str(adapter), str(tmp_path / "x"), "--merge"]
    )
    assert refusal.exit_code == 2


@on_ranks(2)
def test_transformers_reads_what_we_write_and_we_read_what_it_writes(
    rank: Rank, tmp_path: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds

    tokens = torch.arange(12)[None]
    for is_tied in (False, True):
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=is_tied,
        )  # fmt: skip
        torch.manual_seed(0)
        reference = LlamaForCausalLM(config)
        theirs, ours = tmp_path / f"theirs {is_tied}", tmp_path / f"ours {is_tied}"
        if rank.rank == 0:
            reference.save_pretrained(theirs, max_shard_size="20KB")
            config.save_pretrained(ours)
        dist.barrier()
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        for layer in model.model.layers:
            fully_shard(layer, mesh=rank.mesh())
        fully_shard(model, mesh=rank.mesh())
        found = load_safetensors(theirs, model)
        assert "model.rotary_emb.inv_freq" in found.recreated
        torch.testing.assert_close(model(tokens).logits, reference(tokens).logits)
        wrapper = FullyShardedDataParallel(reference, use_orig_params=True)
        for exported in (model, wrapper):
            export_safetensors(ours, exported, max_shard_bytes=20_000)
            again = LlamaForCausalLM.from_pretrained(ours)
            torch.testing.assert_close(again(tokens).logits, model(tokens).logits)
            dist.barrier()
