"""Policies that say which modules become units, and `wrap` to say it where a module is made.

Names, arguments, defaults and meaning are those of `torch.distributed.fsdp.wrap`. A policy is one
of two kinds:

- a function `(module, recurse, nonwrapped_numel) -> bool`, asked twice per module on the way
  through the tree: with `recurse=True` whether to look at the children, and after them with
  `recurse=False` whether to take the module, given the number of elements below it that no module
  inside it has taken. Further arguments are bound with `functools.partial`.
- a `Policy` object, asked once about the whole model. It may also give modules their own options.

`choosing.choose` runs either kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

from fullshard.errors import ConfigError, UnsupportedError

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "Policy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]


class Policy(ABC):
    """A policy that is asked once about a whole model."""

    @abstractmethod
    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        """The modules to take, each with its options: the root's, changed where it wants others."""

    def why(self, module: nn.Module) -> str:
        """Why this policy has taken a module, for people to read."""
        return f"chosen by {type(self).__name__}"


# The name that torch's users derive their own policies from.
_Policy = Policy


class ModuleWrapPolicy(Policy):
    """Takes every module that is an instance of one of the classes, with the root's options.

    It is also a policy of the other kind, a function.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._classes = _checked_classes("ModuleWrapPolicy", module_classes)

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and isinstance(module, self._classes)
        }

    def why(self, module: nn.Module) -> str:
        taken_as = next((each for each in self._classes if isinstance(module, each)), type(module))
        return f"is a {taken_as.__name__}"

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return recurse or isinstance(module, self._classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({{{', '.join(each.__name__ for each in self._classes)}}})"


class CustomPolicy(Policy):
    """Takes the modules that a function of yours says, with the options that it gives.

    `lambda_fn(module)` returns False or an empty dict to leave the module alone, True to take it
    with the root's options, or a dict of options that win over the root's.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        if not callable(lambda_fn):
            raise ConfigError(
                f"CustomPolicy: a function of a module is expected, found {lambda_fn!r}; pass for "
                "example lambda module: isinstance(module, Block)."
            )
        self._lambda_fn = lambda_fn

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        taken: dict[nn.Module, dict[str, Any]] = {}
        for name, module in root_module.named_modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, (bool, dict)):
                raise ConfigError(
                    f"{name or type(module).__name__}: the lambda_fn of a CustomPolicy must return "
                    f"True, False or a dict of options, found {answer!r}; return one of these."
                )
            if answer:
                taken[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return taken

    def why(self, module: nn.Module) -> str:
        return f"chosen by {getattr(self._lambda_fn, '__name__', 'a CustomPolicy')}"


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Take every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Take the modules for which `lambda_fn(module)` is True, anywhere in the tree."""
    return True if recurse else lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: set[type[nn.Module]],
) -> bool:
    """Take the modules that are instances of one of the classes, anywhere in the tree."""
    classes = _checked_classes("transformer_auto_wrap_policy", transformer_layer_cls)
    return recurse or isinstance(module, classes)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Take a module once `min_num_params` elements inside it are not taken yet.

    Args:
        module: The module that is asked about.
        recurse: Whether the question is to look at its children or to take it.
        nonwrapped_numel: How many elements below it no other module has taken.
        min_num_params: From how many elements on a module is taken.
        force_leaf_modules: Classes whose children are not looked at. By default the attribute
            FORCE_LEAF_MODULES of this function.
        exclude_wrap_modules: Classes that are not taken themselves. By default the attribute
            EXCLUDE_WRAP_MODULES of this function.
    """
    if force_leaf_modules is None:
        force_leaf_modules = size_based_auto_wrap_policy.FORCE_LEAF_MODULES  # type: ignore[attr-defined]
    if exclude_wrap_modules is None:
        exclude_wrap_modules = size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES  # type: ignore[attr-defined]
    unwanted = force_leaf_modules if recurse else exclude_wrap_modules
    classes = _checked_classes("size_based_auto_wrap_policy", unwanted)
    return nonwrapped_numel >= min_num_params and not isinstance(module, classes)


# Its parameters are read by functions that never run the modules inside it.
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
# They have no forward.
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def _or_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    policies: Iterable[Callable[..., bool]],
) -> bool:
    """Say yes where one of several functions does."""
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        for policy in policies
    )


@dataclass(frozen=True, slots=True)
class _Wrapping:
    """What `wrap` does inside of an `enable_wrap`."""

    wrapper_cls: Callable[..., nn.Module]
    options: dict[str, Any]


_wrapping: ContextVar[_Wrapping | None] = ContextVar("wrapping", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Generator[None, None, None]:
    """Let `wrap` wrap modules in `wrapper_cls`, with these options, until the block ends.

        with enable_wrap(wrapper_cls=FullyShardedDataParallel, mixed_precision=precision):
            self.first = wrap(nn.Linear(5, 5))

    Blocks do not nest.
    """
    if not callable(wrapper_cls):
        raise ConfigError(
            f"enable_wrap: wrapper_cls must be a class or a function of a module, found "
            f"{wrapper_cls!r}; pass for example FullyShardedDataParallel."
        )
    if _wrapping.get() is not None:
        raise UnsupportedError(
            "enable_wrap: it must not be entered twice, found another one around it; end that one "
            "first, or pass the options that differ to wrap()."
        )
    token = _wrapping.set(_Wrapping(wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _wrapping.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap a module as the `enable_wrap` around this call says; outside of one, return it as it is.

    Options given here win over those of `enable_wrap`.
    """
    wrapping = _wrapping.get()
    if wrapping is None:
        return module
    return wrapping.wrapper_cls(module, **{**wrapping.options, **wrap_overrides})


def _checked_classes(subject: str, classes: Any) -> tuple[type, ...]:
    if isinstance(classes, type) or not isinstance(classes, Iterable):
        name = classes.__name__ if isinstance(classes, type) else repr(classes)
        raise ConfigError(
            f"{subject}: a set of module classes is expected, found {name}; put the class in "
            "braces, as in {Block}."
        )
    checked = tuple(dict.fromkeys(classes))
    for each in checked:
        if not isinstance(each, type):
            raise ConfigError(
                f"{subject}: module classes are expected, found {each!r}; pass classes, not "
                "modules or names: for example {type(module)}."
            )
    return checked
