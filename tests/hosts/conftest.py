"""Tests on several hosts are collected only where hosts can be made, so that none is skipped."""

from tests.hosts import slurm
from tests.support.hosts import reason_not_here

if reason_not_here():
    collect_ignore_glob = ["test_*.py"]
elif slurm.reason_not_here():
    collect_ignore = ["test_slurm.py"]
