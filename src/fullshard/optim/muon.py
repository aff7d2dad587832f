"""`Muon`: the optimizer that orthogonalizes the updates of matrices, on shards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.errors import ConfigError
from fullshard.optim.by_unit import by_unit
from fullshard.optim.matrices import require_matrices
from fullshard.optim.muon_options import State, names_of, require_options
from fullshard.optim.muon_step import Exchange, Work
from fullshard.optim.owners import Owners
from fullshard.optim.selection import Choice, select


class Muon(Optimizer):
    """Muon, as `torch.optim.Muon`, for parameters that are sharded in any way, or not at all.

        optimizer = Muon.of(model, lr=1e-3)

    trains the matrices of a model's blocks with Muon and everything else with AdamW. With groups of
    your own, a group that has `betas` is trained with AdamW:

        optimizer = Muon([{"params": matrices}, {"params": others, "betas": (0.9, 0.95)}], lr=1e-3)

    Parameters may be those of `fully_shard`, of `FullyShardedDataParallel`, or plain tensors, and
    may be sharded later. Each matrix is orthogonalized on one rank, which `explain(optimizer)`
    shows. A parameter with three dims is a stack of matrices, such as the weights of experts.

    Args:
        params: Parameters or groups of them; `model.named_parameters()` makes messages clearer.
        lr: Learning rate, adjusted for each matrix by `adjust_lr_fn`.
        weight_decay: Decoupled weight decay, by `lr` as it is.
        momentum: The share of the momentum that a step keeps.
        nesterov: Whether updates use the momentum that the next step would have.
        ns_coefficients: The coefficients of the Newton-Schulz polynomial.
        eps: The smallest norm that a matrix is divided by.
        ns_steps: The number of Newton-Schulz steps.
        adjust_lr_fn: "original" (the default), for learning rates of Muon alone, or
            "match_rms_adamw", for those of AdamW.
        exchange: "all_to_all", or "all_gather" for a network on which an all-to-all of so many
            ranks fails: it sends every matrix to every rank.
    """

    exchange: Exchange = "all_to_all"
    found_inf: torch.Tensor | None = None
    """If it is set and not 0, a step changes nothing: for a step that was captured."""

    _adamw: torch.optim.AdamW | None = None
    _work: Work | None = None

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        exchange: Exchange = "all_to_all",
    ) -> None:
        if exchange not in ("all_to_all", "all_gather"):
            raise ConfigError(
                f"Muon: exchange must be 'all_to_all' or 'all_gather', not {exchange!r}."
            )
        self.exchange = exchange
        defaults: State = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        defaults |= {"nesterov": nesterov, "ns_coefficients": ns_coefficients, "eps": eps}
        defaults |= {"ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        require_options(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: State) -> None:
        """Add a group: of matrices, or with `betas` one that AdamW trains."""
        own = self.defaults
        if not is_for_muon(param_group):
            self.defaults = _adamw_defaults() | {"lr": own["lr"]}
        try:
            super().add_param_group(param_group)
        finally:
            self.defaults = own
        group = self.param_groups[-1]
        try:
            if is_for_muon(group):
                require_options(group)
                for param, name in zip(group["params"], names_of(group), strict=True):
                    require_matrices(param, name)
        except ConfigError:
            self.param_groups.pop()
            raise

    @classmethod
    def of(
        cls,
        model: nn.Module,
        lr: float | torch.Tensor = 1e-3,
        *,
        weight_decay: float = 0.1,
        by_muon: Choice | None = None,
        adamw: State | None = None,
        adjust_lr_fn: str | None = "match_rms_adamw",
        **options: Any,
    ) -> Muon:
        """Train the matrices of a model's blocks with Muon, and everything else with AdamW.

        Embeddings, heads, norms and biases are for AdamW, which steps by unit; so are convolutions.
        The model may be sharded, or be sharded later.

        Args:
            model: The model; parameters that take no gradient are left out.
            lr: The learning rate of both: `adjust_lr_fn` makes that of Muon comparable.
            weight_decay: That of matrices; vectors, norms and embeddings do not decay.
            by_muon: Called with the name and the full shape of each parameter: True lets Muon train
                it, False AdamW, and None leaves it as it would be.
            adamw: Options of AdamW, such as `{"betas": (0.9, 0.95), "lr": 3e-4}`.
            adjust_lr_fn: As of `Muon`.
            options: Further options of `Muon`.
        """
        found = select(model, by_muon or (lambda name, shape: None))
        devices = {param.device.type for param in (*found.decayed, *found.undecayed)}
        shared = {"betas": (0.9, 0.95), "fused": devices <= {"cpu", "cuda"}, **(adamw or {})}
        groups: list[State] = [
            {"params": params, "weight_decay": decay, **own}
            for params, decay, own in (
                (found.matrices, weight_decay, {}),
                (found.decayed, weight_decay, shared),
                (found.undecayed, 0.0, shared),
            )
            if params
        ]
        if not groups:
            raise ConfigError(
                f"No parameter of {type(model).__name__} requires a gradient; call "
                "requires_grad_() on those to train with Muon."
            )
        return cls(groups, lr, weight_decay, adjust_lr_fn=adjust_lr_fn, **options)

    @property
    def matrix_groups(self) -> list[State]:
        """The groups that Muon trains."""
        return [group for group in self.param_groups if is_for_muon(group)]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update parameters that have gradients. A collective of the ranks that share them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_others()
        groups = self.matrix_groups
        if groups:
            if self._work is None or not self._work.fits(groups):
                self._work = Work(groups, self.exchange)
            self._work.step(groups, self.state, self.found_inf)
        return loss

    def owners(self) -> Owners:
        """Which rank orthogonalizes which matrix, as parameters are sharded now; prints as a table.

        Needs no communication.
        """
        groups = self.matrix_groups
        work = self._work
        if work is None or not work.fits(groups):
            work = Work(groups, self.exchange, is_compared=False)
        return work.owners()

    def _step_others(self) -> None:
        """Step AdamW on its groups, whose options and state are those of this optimizer."""
        groups = [group for group in self.param_groups if not is_for_muon(group)]
        if not groups:
            return
        if self._adamw is None:
            copies = [{**group, "params": list(group["params"])} for group in groups]
            self._adamw = by_unit(torch.optim.AdamW(copies))
        adamw: Any = self._adamw
        adamw.state, adamw.param_groups = self.state, groups
        if self.found_inf is not None:
            adamw.found_inf = self.found_inf.reshape(())  # as the steps that it counts
        adamw.step()


def is_for_muon(group: State) -> bool:
    """Whether Muon trains a group, and not AdamW."""
    return "betas" not in group


@functools.cache
def _adamw_defaults() -> State:
    return torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).defaults
