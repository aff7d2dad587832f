"""Plans a run of `fullshard train`: simulates its step, and chooses settings that fit."""

from __future__ import annotations

import importlib
import shlex
import sys
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.doctor import NetworkSpeeds, available_bytes
from fullshard.errors import ConfigError, FullshardError
from fullshard.formatting import readable
from fullshard.plan import Job, Kind, Machine, StepPlan, known_profile, profile_named, simulate
from fullshard.wrap import repeated_blocks
from fullshard_train.config import KEYS, TrainConfig, mesh_shape, value_of
from fullshard_train.models.architecture import Architecture
from fullshard_train.models.elementwise import played_on
from fullshard_train.models.float8 import PRECISIONS
from fullshard_train.models.optional import first_line
from fullshard_train.models.tokenizers import Tokenizer
from fullshard_train.models.transformer import BuiltinArchitecture
from fullshard_train.optimizer import build_optimizer
from fullshard_train.sharding import architecture_for, build_sharded_model, wires_of
from fullshard_train.world import World, best_device

_META = torch.device("meta")
# For models with more blocks than this, models with few tell what each further block adds.
_MANY_BLOCKS = 12
_FEW_BLOCKS = (3, 4)
_FEW_MICRO_BATCHES = 2
# Selective recomputation runs Python for each operation of a block; fitted on a CPU.
_SELECTIVE_LAUNCH = 2.0
_CPU_RANKS = 2  # as the launcher starts
_MOST_RANKS = 1024  # that are suggested
Place = tuple[str, str]
_RECOMPUTED: Place = ("sharding", "activation_checkpointing")
_SELECTIVE: Place = ("sharding", "selective_checkpointing")
# Changes that reduce the memory of a rank.
_CHANGES: Mapping[str, dict[Place, Any]] = {
    "--offload": {("sharding", "offload"): True},
    "--activation-checkpointing": {_RECOMPUTED: True, _SELECTIVE: False},
    "--batch 1": {("optimizer", "batch"): 1},
}


def plan_run(config: TrainConfig, architecture: Architecture, machine: Machine) -> StepPlan:
    """Return the step of a rank of a run, simulated on a machine."""
    section, played = config.sharding, machine.profile.device_type
    mesh_shape(section, machine.num_ranks)
    if section.precision == "auto":
        section = replace(section, precision="float32" if played == "cpu" else "bf16")
    if section.precision in PRECISIONS:
        section = replace(section, precision="bf16")  # what is kept between layers
    # Compiled blocks save no more activations than others; a CPU has its own memory only.
    section = replace(section, compile=False, offload=section.offload and played != "cpu")
    if section.offload and section.api == "wrapper":
        section = replace(section, api="fully_shard")  # which holds and moves the same
    world = World(0, machine.num_ranks, 0, machine.ranks_per_host, _META)
    shape = (config.optimizer.batch, config.model.sequence)

    def make() -> Job:
        model = build_sharded_model(architecture, section, world)
        optimizer = build_optimizer(model, config.optimizer, torch.device(played))
        inputs, targets = (torch.empty(shape, dtype=torch.int64, device=_META) for _ in range(2))

        def loss() -> torch.Tensor:
            total = architecture.loss(model, inputs, targets)
            return total / targets.ge(0).sum().clamp(min=1)

        limit = config.optimizer.clip or torch.inf
        return Job(model, loss, optimizer, lambda params: nn.utils.clip_grad_norm_(params, limit))

    accumulate, profile = config.optimizer.accumulate, machine.profile
    if section.selective_checkpointing:
        profile = replace(profile, launch_s=profile.launch_s * _SELECTIVE_LAUNCH)
    simulated = replace(machine, profile=profile)
    with played_on(played):
        found = simulate(make, simulated, accumulate=accumulate, is_offloaded=section.offload)
    return replace(found, machine=machine)


def planned_architecture(config: TrainConfig) -> Architecture:
    """Return the architecture of `--model`, which may also be module:function."""
    module, _, function = config.model.name.partition(":")
    if function and not Path(config.model.name).exists():
        return FunctionArchitecture(module, function)
    return architecture_for(config.model, config.data.tokenizer)


class FunctionArchitecture(Architecture):
    """A model that a function builds, for plans only: tokens in, logits out."""

    vocabulary, max_sequence, default_tokenizer = 0, None, "bytes"

    def __init__(self, module: str, function: str) -> None:
        self.name = f"{module}:{function}"
        try:
            self._make = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"--model: {self.name} cannot be loaded ({error}); pass module:function, "
                "importable from this folder."
            ) from None

    def build(self) -> nn.Module:
        try:
            with _META:
                model: nn.Module = self._make()
            found = next((n for n, p in model.named_parameters() if not p.is_meta), None)
        except FullshardError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self.name}: the model does not build on the meta device "
                f"({type(error).__name__}: {error}); compute values of tensors after it is built."
            ) from error
        if found is not None:
            raise ConfigError(
                f"{self.name}: the model does not stay on the meta device ({found!r}); do not "
                "pass devices when it is built."
            )
        return model

    def block_classes(self) -> tuple[type[nn.Module], ...]:
        return tuple({type(members[0]) for members in repeated_blocks(self.build())})

    def logits(self, model: nn.Module, tokens: torch.Tensor, positions: Any = None) -> torch.Tensor:
        found = model(tokens)
        logits: torch.Tensor = getattr(found, "logits", found)
        return logits

    def fill(self, model: nn.Module, seed: int) -> None:
        raise NotImplementedError

    def write_config(self, folder: Path, dtype: str, tokenizer: Tokenizer) -> None:
        raise NotImplementedError


# Choosing settings


@dataclass(frozen=True)
class Candidate:
    """Settings, what a step takes with them, and why they were not chosen."""

    config: TrainConfig
    machine: Machine
    kinds: Mapping[str, int]
    step_s: float
    host_s: float
    host_bytes: int
    verdict: str = ""

    @property
    def peak_bytes(self) -> int:
        return sum(self.kinds.values())

    @property
    def amount(self) -> str:
        host = f" and {readable(self.host_bytes)} of host memory" if self.host_bytes else ""
        return readable(self.peak_bytes) + host

    @property
    def tokens_per_s(self) -> float:
        optimizer = self.config.optimizer
        return optimizer.batch * optimizer.accumulate * self.config.model.sequence / self.step_s

    @cached_property
    def flags(self) -> str:
        """The options of `fullshard train` that differ from their defaults."""
        words = []
        for key in KEYS.values():
            value = value_of(self.config, key)
            if key.section not in ("model", "sharding", "optimizer") or value == key.default:
                continue
            for each in value if isinstance(value, tuple) else (value,):
                words += [f"--{key.option}"] if each is True else [f"--{key.option}", str(each)]
        return shlex.join(words)

    @cached_property
    def python(self) -> str:
        """The Python call that shards a model with these settings."""
        section = self.config.sharding
        replicas, shards = mesh_shape(section, self.machine.num_ranks)
        shape = f"({shards},)"
        if replicas > 1:
            shape = f'({replicas}, {shards}), mesh_dim_names=("replicate", "shard")'
        words = [f'mesh=init_device_mesh("{self.machine.profile.device_type}", {shape})']
        if section.units:
            words.insert(0, f"ModuleWrapPolicy({{{', '.join(section.units)}}})")
        if section.strategy != "full" or section.reshard_to:
            words.append(f"reshard_after_forward={section.reshard_to or False}")
        policy = []
        if section.precision != "float32" and self.machine.profile.device_type != "cpu":
            policy += ["torch.bfloat16", "torch.float32"]
        policy += [f"{key}={each!r}" for key, each in wires_of(section).items() if each]
        if policy:
            words.append(f"mp_policy=MixedPrecisionPolicy({', '.join(policy)})")
        words += ["offload_policy=CPUOffloadPolicy()"] * section.offload
        notes = []
        if section.activation_checkpointing:
            notes.append("checkpoint() in every block")
        if section.selective_checkpointing:
            notes.append("checkpoint(context_fn=create_selective_checkpoint_contexts) in blocks")
        if section.prefetch > 1:
            notes.append(f"{section.prefetch} modules in set_modules_to_forward_prefetch")
        return f"auto_shard(model, {', '.join(words)}){'  # and ' * bool(notes)}{', '.join(notes)}"

    def fits(self, budget_bytes: int) -> bool:
        return self.peak_bytes <= budget_bytes


def choose_settings(
    config: TrainConfig,
    architecture: Architecture,
    machine: Machine,
    budget_bytes: int,
    given: Collection[Place] = (),
    progress: Callable[[int, int], None] = lambda *_: None,
) -> list[Candidate]:
    """Return settings that fit, the fastest first, and then those that do not fit.

    Settings in `given` stay. A step keeps its number of tokens: larger micro-batches are fewer.
    `progress` is called with how many settings were simulated, and 0: the total is not known.

    Raises:
        ConfigError: If nothing fits.
    """
    num_simulated = 0

    def estimated(changed: TrainConfig) -> Candidate:
        nonlocal num_simulated
        candidate = _estimated(changed, architecture, machine)
        num_simulated += 1
        progress(num_simulated, 0)
        return candidate

    found: list[Candidate] = []
    meshes: list[dict[Place, Any]] = [{}]
    is_free = ("sharding", "mesh") not in given and not config.sharding.reshard_to
    if machine.num_hosts > 1 and is_free:
        meshes.append({("sharding", "mesh"): f"{machine.num_hosts}x{machine.ranks_per_host}"})
    for mesh in meshes:
        # Each of these takes longer than the one before but less memory: take the first that fits.
        # With a larger micro-batch, those before it do not fit either.
        savings = list(_savings(config, architecture, machine, given))
        # Selective recomputation takes more memory than full; less time unless the host is slow.
        tries_selective = not {_RECOMPUTED, _SELECTIVE} & {*given}
        for batch in _batches(config, given):
            while savings:
                changed = _with(config, {**batch, **mesh, **savings[0]})
                found.append(estimated(changed))
                if found[-1].fits(budget_bytes):
                    break
                del savings[0]
            if savings and savings[0].get(_RECOMPUTED) and tries_selective:
                changed = _with(changed, {_RECOMPUTED: False, _SELECTIVE: True})
                found.append(estimated(changed))
                tries_selective = found[-1].fits(budget_bytes)
    fitting = sorted(
        (each for each in found if each.fits(budget_bytes)), key=lambda each: -each.tokens_per_s
    )
    others = sorted(
        (each for each in found if not each.fits(budget_bytes)), key=lambda each: each.peak_bytes
    )
    if not fitting:
        raise ConfigError(
            f"{architecture.name}: no settings fit into {readable(budget_bytes)} on each of "
            f"{machine.num_ranks} ranks; the smallest need {readable(others[0].peak_bytes)} "
            f"({others[0].flags}). Raise the budget, add ranks, or shorten --sequence."
        )
    for place, value in _refinements(fitting[0].config, machine):
        if place not in given:
            other = estimated(_with(fitting[0].config, {place: value}))
            if other.fits(budget_bytes) and other.step_s < 0.99 * fitting[0].step_s:
                fitting.insert(0, other)
    best = fitting[0]
    coarser = [estimated(_with(best.config, each)) for each in _roundings(machine, given)]
    return [
        best,
        *(
            replace(each, verdict=f"changes rounding; {1 - each.step_s / best.step_s:.0%} faster")
            for each in coarser
            if each.step_s < 0.99 * best.step_s and each.fits(budget_bytes)
        ),
        *(
            replace(each, verdict=f"{best.tokens_per_s / each.tokens_per_s - 1:.0%} slower")
            for each in fitting[1:]
        ),
        *(replace(each, verdict=f"needs {readable(each.peak_bytes)}") for each in others),
    ]


def _with(config: TrainConfig, changes: dict[Place, Any]) -> TrainConfig:
    for (section, name), value in changes.items():
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def _batches(config: TrainConfig, given: Collection[Place]) -> Iterator[dict[Place, Any]]:
    """Yield sizes and numbers of micro-batches that make up the same step."""
    batch, accumulate = ("optimizer", "batch"), ("optimizer", "accumulate")
    total = config.optimizer.batch * config.optimizer.accumulate
    for size in range(1, total + 1):
        is_kept = size == config.optimizer.batch
        if is_kept or (total % size == 0 and not {batch, accumulate} & set(given)):
            yield {batch: size, accumulate: total // size}


def _roundings(machine: Machine, given: Collection[Place]) -> Iterator[dict[Place, Any]]:
    """Yield settings that may be faster, but compute or send other values."""
    precision, gather, reduce = (
        ("sharding", name) for name in ("precision", "gather_wire", "reduce_wire")
    )
    if precision not in given and machine.profile.device_type != "cpu":
        yield {precision: "bf16-reduce"}
    if machine.num_ranks == 1 or {gather, reduce} & {*given}:
        return
    yield {gather: "int8", reduce: "bf16"}
    yield {gather: "int8", reduce: "int8"}
    if machine.num_hosts > 1:
        yield {gather: "int8", reduce: "int4"}


def _refinements(config: TrainConfig, machine: Machine) -> Iterator[tuple[Place, int]]:
    """Yield settings that may make the best ones faster, but take more memory."""
    section, local = config.sharding, machine.ranks_per_host
    if section.api == "wrapper":
        return
    _, shards = mesh_shape(section, machine.num_ranks)
    if section.strategy == "full" and local < shards and shards % local == 0:
        yield ("sharding", "reshard_to"), local
    yield ("sharding", "prefetch"), 2


def _savings(
    config: TrainConfig, architecture: Architecture, machine: Machine, given: Collection[Place]
) -> Iterator[dict[Place, Any]]:
    strategy, offload = ("sharding", "strategy"), ("sharding", "offload")
    units = ("sharding", "units")
    own = {offload: False, units: config.sharding.units}
    smallest = {**own, strategy: "full", _RECOMPUTED: True}
    steps: list[dict[Place, Any]] = [
        {**own, strategy: "grad-op", _RECOMPUTED: False},
        {**own, strategy: "full", _RECOMPUTED: False},
        smallest,
        {**smallest, units: _parts_of_blocks(architecture) or own[units]},
    ]
    if _can_offload(config, machine):
        steps.append({**smallest, offload: True})
    kept = {*given}
    kept |= {strategy} if config.sharding.reshard_to else set()
    kept |= {_RECOMPUTED} if config.sharding.selective_checkpointing else set()
    seen: list[dict[Place, Any]] = []
    for step in steps:
        free = {place: value for place, value in step.items() if place not in kept}
        if free not in seen:
            seen.append(free)
            yield free


def _parts_of_blocks(architecture: Architecture) -> tuple[str, ...]:
    """Return the classes of the large parts of a block, which may be units instead of it."""
    classes = architecture.block_classes()
    block = next(
        (each for each in architecture.build().modules() if isinstance(each, classes)), None
    )
    parts = [] if block is None else [*block.children()]
    sizes = {type(part).__name__: sum(p.numel() for p in part.parameters()) for part in parts}
    large = tuple(name for name, size in sizes.items() if 8 * size >= sum(sizes.values()))
    return large if len(large) > 1 else ()


def _estimated(config: TrainConfig, architecture: Architecture, machine: Machine) -> Candidate:
    """Plan a run; instead of many blocks, plan few and one more: each further one adds the same."""
    few, more = _FEW_BLOCKS
    if not isinstance(architecture, BuiltinArchitecture) or (
        architecture.size.num_blocks <= _MANY_BLOCKS
    ):
        return _candidate(config, architecture, machine)
    size, lora = architecture.size, architecture.lora
    small, large = (
        _candidate(config, BuiltinArchitecture(replace(size, num_blocks=n), lora), machine)
        for n in (few, more)
    )

    def extended(before: float, after: float) -> float:
        return max(0, after + (size.num_blocks - more) * (after - before))

    host_s = extended(small.host_s, large.host_s)
    return Candidate(
        config,
        machine,
        {name: int(extended(small.kinds[name], large.kinds[name])) for name in large.kinds},
        max(extended(small.step_s, large.step_s), host_s),
        host_s,
        int(extended(small.host_bytes, large.host_bytes)),
    )


def _candidate(config: TrainConfig, architecture: Architecture, machine: Machine) -> Candidate:
    """Plan a run with few micro-batches: every further one takes as long as the last."""
    accumulate = min(config.optimizer.accumulate, _FEW_MICRO_BATCHES)
    shorter = _with(config, {("optimizer", "accumulate"): accumulate})
    found = plan_run(shorter, architecture, machine)
    further = config.optimizer.accumulate - accumulate
    step_s, host_s = (
        whole + further * part
        for whole, part in zip((found.step_s, found.host_s), found.micro_batch_s, strict=True)
    )
    kinds = {kind.value: found.peak.kinds.get(kind, 0) for kind in Kind}
    kinds["driver and libraries"] = found.context_bytes
    return Candidate(config, machine, kinds, max(step_s, host_s), host_s, found.host_bytes)


# Runs of this machine


def this_machine(
    device_type: str, num_ranks: int, num_local_ranks: int, network: NetworkSpeeds | None = None
) -> Machine:
    """Return the devices of a run on machines like this one."""
    profile = profile_named("CPU")
    if device_type == "cuda":
        name = torch.cuda.get_device_name()
        profile = known_profile(name) or replace(profile_named("H100"), name=name)
    if network is not None:
        profile = network.of_profile(profile)
    num_hosts = num_ranks // num_local_ranks if num_ranks % num_local_ranks == 0 else 1
    return Machine(profile=profile, ranks_per_host=num_ranks // num_hosts, num_hosts=num_hosts)


def predicted(
    config: TrainConfig,
    num_ranks: int,
    num_local_ranks: int,
    network: NetworkSpeeds | None = None,
) -> dict[str, Any]:
    """Return the predicted time and memory of a step, for the report and for errors.

    Returns an empty dict if the model cannot be simulated.

    Raises:
        ConfigError: If the run does not fit; the message lists changes that would make it fit.
    """
    device_type = best_device(config.run.device)
    machine = this_machine(device_type, num_ranks, num_local_ranks, network)
    capacity = capacity_of(torch.device(device_type), num_local_ranks)
    architecture = architecture_for(config.model, config.data.tokenizer)
    try:
        own = _estimated(config, architecture, machine)
    except Exception as error:
        reason = f"memory and time of this run are not predicted ({first_line(error)})"
        print(reason, file=sys.stderr, flush=True)
        return {}
    require_fit(own, architecture, capacity)
    memory = {name: size for name, size in own.kinds.items() if size}
    words = ""
    if own.peak_bytes > capacity / 2:
        words = f"This run was predicted to need {own.amount}"
        for also, other in _remedies(own, architecture, own.peak_bytes - 1):
            words += f", with {also} {other.amount}"
    return {
        "step_s": own.step_s,
        "peak_bytes": own.peak_bytes,
        "memory": memory,
        "remedies": words and f"{words}.",
    }


def require_fit(own: Candidate, architecture: Architecture, capacity_bytes: int) -> None:
    """Raise a ConfigError if a run needs more memory, with changes that would make it fit."""
    if own.fits(capacity_bytes):
        return
    offers = [
        f"{words} would need {other.amount}"
        for words, other in _remedies(own, architecture, capacity_bytes)
    ]
    number = own.machine.num_ranks
    who = f"each of {number} ranks" if number > 1 else "the rank"
    raise ConfigError(
        f"{architecture.name} does not fit into memory: {who} needs "
        f"{readable(own.peak_bytes)} and has {readable(capacity_bytes)}; "
        f"{', '.join(offers) or 'choose a smaller model or a shorter --sequence'}."
    )


def _remedies(
    own: Candidate, architecture: Architecture, limit_bytes: int
) -> Iterator[tuple[str, Candidate]]:
    """Yield the smallest changes that make a run fit, and what the run would take with them."""
    config, machine = own.config, own.machine

    def changed(words: Collection[str]) -> TrainConfig:
        return _with(config, {at: value for each in words for at, value in _CHANGES[each].items()})

    helpful = [each for each in _CHANGES if changed([each]) != config]
    if not _can_offload(config, machine) and "--offload" in helpful:
        helpful.remove("--offload")
    for size in range(1, len(helpful) + 1):
        found = {
            " ".join(words): _estimated(changed(words), architecture, machine)
            for words in combinations(helpful, size)
        }
        fitting = {words: each for words, each in found.items() if each.fits(limit_bytes)}
        yield from fitting.items()
        if fitting:
            break
    if config.sharding.strategy == "none" or machine.profile.device_type == "cpu":
        return  # more ranks would need the same memory each, or share the same memory
    replicas, shards = mesh_shape(config.sharding, machine.num_ranks)
    for words in ((), tuple(each for each in helpful if each != "--offload")):

        @cache
        def wider(exponent: int, words: Collection[str] = words) -> Candidate:
            number = replicas << exponent
            meshed = _with(changed(words), {("sharding", "mesh"): f"{replicas}x{1 << exponent}"})
            more = replace(machine, ranks_per_host=number, num_hosts=1)
            return _estimated(meshed, architecture, more)

        exponents = range(shards.bit_length(), (_MOST_RANKS // replicas).bit_length())
        index = bisect_left(exponents, True, key=lambda each: wider(each).fits(limit_bytes))
        if index < len(exponents):
            other = wider(exponents[index])
            also = f" with {' '.join(words)}" if words else ""
            yield f"{other.machine.num_ranks} ranks{also}", other
            return


def _can_offload(config: TrainConfig, machine: Machine) -> bool:
    section, name = config.sharding, config.optimizer.name
    return (
        machine.profile.device_type != "cpu" and section.strategy != "none" and name != "adamw8bit"
    )


def capacity_of(device: torch.device, num_local_ranks: int) -> int:
    """Return the memory of a rank's GPU, or its share of the available host memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return available_bytes() // num_local_ranks


def chosen_for_this_machine(config: TrainConfig, given: Collection[Place]) -> TrainConfig:
    """Return the fastest settings that fit into the memory of this machine's devices."""
    device_type = best_device(config.run.device)
    default = torch.cuda.device_count() if device_type == "cuda" else _CPU_RANKS
    num_ranks = config.run.ranks or default
    machine = this_machine(device_type, num_ranks, num_ranks)
    budget = capacity_of(torch.device(device_type), num_ranks)
    best, *_ = choose_settings(config, planned_architecture(config), machine, budget, given)
    print(
        f"chosen for {readable(budget)} on each rank: {best.flags or 'the defaults'}",
        file=sys.stderr,
        flush=True,
    )
    return best.config
