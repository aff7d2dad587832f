"""Reports of runs: one HTML file with figures and tables, which opens without a network.

The packages that draw it belong to the extra `report` and are imported when a report is written.
"""

from fullshard.facts import unit_facts
from fullshard_train.report.page import write_report
from fullshard_train.report.record import RunRecord, StepMetrics, read_record

__all__ = ["RunRecord", "StepMetrics", "read_record", "unit_facts", "write_report"]
