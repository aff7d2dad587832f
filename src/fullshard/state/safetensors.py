"""Models as safetensors files: what other programs read and write."""

from fullshard.state.safetensors_export import export_safetensors
from fullshard.state.safetensors_import import LoadedWeights, load_safetensors

__all__ = ["LoadedWeights", "export_safetensors", "load_safetensors"]
