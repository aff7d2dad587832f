"""What modules sharded by `fully_shard` and wrappers have in common."""

from __future__ import annotations

from typing import Any, NoReturn, cast

from torch import nn

from fullshard._torch import has_own_grad_dtype, set_grad_dtype
from fullshard.errors import MisuseError
from fullshard.runtime.hooks import require_hooks, units_below


class ShardedModule:
    """The methods that modules sharded by `fully_shard` and wrappers have in common."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; if it raises, reset the scheduler."""
        return require_hooks(self).guarded(super().__call__, args, kwargs)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, also those that were accumulated without communication."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for unit in units_below(cast(nn.Module, self)):
            unit.grads.drop_kept(unit.params)
            for param in (each.param for each in unit.params):  # modules may have others now
                if set_to_none:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.zero_()

    def set_uneven(self, is_uneven: bool = True) -> None:
        """Set whether ranks may run different units inside of this module, in any order.

        They are then gathered and reduced by agreement. The module itself must run equally often
        on all ranks, and all of them must call this.
        """
        hooks = require_hooks(self)
        hooks.require_not_computing("set_uneven")
        hooks.is_uneven = is_uneven
        if hooks.scheduler is not None:
            hooks.scheduler.follow_uneven()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise MisuseError(
            f"{type(self).__name__}: FSDP does not support deepcopy of a sharded module; copy "
            "it before sharding, or build a second model, shard it alike and load the state dict "
            "of this one."
        )

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or convert the shards, and plan the units again."""
        hooks = require_hooks(self)
        for unit in hooks.reads:
            unit.reshard_now()
        # Gradients keep a user's own `grad_dtype` after a conversion.
        own = {}
        for param in (param for unit in hooks.units for param in unit.params):
            if has_own_grad_dtype(param.shard):
                own[param] = param.grad_dtype, param.shard.grad
                param.shard.grad = None
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for unit in hooks.units:
            unit.refresh()
        for param, (dtype, grad) in own.items():
            set_grad_dtype(param.shard, dtype)
            param.shard.grad = None if grad is None else grad.to(param.shard.device)
        return result
