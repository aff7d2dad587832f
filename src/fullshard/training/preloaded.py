"""What a rank needs, loaded once by the process that ranks are forked from."""

import gc
from importlib import import_module

gc.disable()  # what is imported stays: collections would only visit it, again and again
for _module in ("launcher", "run"):
    import_module(f"fullshard.training.{_module}")
_torch = import_module("torch")
_torch.optim.AdamW([_torch.zeros(1)])  # the first optimizer loads many modules
gc.enable()
gc.collect()
gc.freeze()  # a collection in a rank would copy every page that it visits
