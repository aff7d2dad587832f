"""Implements `fullshard train`, `fullshard generate` and `fullshard doctor`."""
