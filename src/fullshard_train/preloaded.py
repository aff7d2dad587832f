"""Loads what ranks need, once, in the process that they are forked from."""

import gc
from importlib import import_module

import_module("fullshard_train.control").end_with_launcher()
gc.disable()  # imported objects stay: collections would only visit them again and again
for _module in ("launcher", "run"):
    import_module(f"fullshard_train.{_module}")
_torch = import_module("torch")
_torch.optim.AdamW([_torch.zeros(1)])  # the first optimizer loads many modules
gc.enable()
gc.collect()
gc.freeze()  # a collection in a rank would copy every page that it visits
