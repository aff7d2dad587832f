"""What helps when a rank fails, stops or is out of memory. The engine works without this room.

Importing it lets `comm/guard.py` create watchers.
"""

from fullshard.comm.guard import patience_s
from fullshard.resilience.nonfinite import first_nonfinite
from fullshard.resilience.oom_guard import explain_out_of_memory
from fullshard.resilience.watcher import report_exit, report_failure

__all__ = [
    "explain_out_of_memory",
    "first_nonfinite",
    "patience_s",
    "report_exit",
    "report_failure",
]
