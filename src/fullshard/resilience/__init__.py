"""What helps when a rank fails, stops or is out of memory. The engine works without this room.

Importing it has `comm/guard.py` make watchers.
"""

from fullshard.resilience import watcher

__all__ = ["watcher"]
