"""Agreement of a policy with recorded answers of the engine that it mirrors."""

from moectl.oracle.recorded_fields import FIELDS, ComparedField, DecisionPair, Record, gate_kind

from .decisions import compare, compare_file
from .grid import RecordedGrid, decide, read_decisions, read_grid, recorded_device, recorded_problem
from .report import AgreementTally, ConformanceReport, FieldDisagreement
from .rounding import compare_rounding, read_rounding

__all__ = [
    "FIELDS",
    "AgreementTally",
    "ComparedField",
    "ConformanceReport",
    "DecisionPair",
    "FieldDisagreement",
    "Record",
    "RecordedGrid",
    "compare",
    "compare_file",
    "compare_rounding",
    "decide",
    "gate_kind",
    "read_decisions",
    "read_grid",
    "read_rounding",
    "recorded_device",
    "recorded_problem",
]
