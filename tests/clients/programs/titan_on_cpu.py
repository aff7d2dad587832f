"""torchtitan takes "cuda" where no other accelerator is: let it find the CPU."""

import torch

torch._utils._get_available_device_type = lambda: "cpu"
