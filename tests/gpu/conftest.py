"""Tests that need CUDA are collected only where CUDA is, so that none of them is ever skipped."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
