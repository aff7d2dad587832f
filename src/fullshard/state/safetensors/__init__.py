"""Models as safetensors files: exported from shards, and loaded into shards."""
