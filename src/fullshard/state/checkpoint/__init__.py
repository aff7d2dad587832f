"""Checkpoints of models that are sharded in any way, or not at all.

A checkpoint is a folder of

    manifest.json       what the checkpoint holds, with checksums; the last file that is written
    .metadata           the index of `torch.distributed.checkpoint`
    __<rank>_<n>.distcp tensors, as `torch.distributed.checkpoint` writes them
    rank_<rank>.pt      what each rank saved for itself, and the state of its random generators

Each file says which checkpoint it is of, and which part: exchanged files are noticed even where
their sizes and contents are equal.
"""
