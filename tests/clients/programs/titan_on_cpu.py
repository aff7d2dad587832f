"""torchtitan assumes "cuda" if there is no other accelerator: let it find the CPU."""

import torch

torch._utils._get_available_device_type = lambda: "cpu"
