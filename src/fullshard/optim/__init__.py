"""Gradient clipping and gradient scaling where gradients are sharded."""
