"""A run as one page: figures and tables in a file that opens without a network.

What draws it is the extra `report`, imported when a report is written.
"""

from fullshard.report.reading import read_record
from fullshard.report.record import RunRecord, StepMetrics
from fullshard.report.writing import write_report
from fullshard.runtime.describing import unit_facts

__all__ = ["RunRecord", "StepMetrics", "read_record", "unit_facts", "write_report"]
