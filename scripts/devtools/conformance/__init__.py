"""Agreement of a policy with recorded answers of the engine that it mirrors."""

from moectl.oracle.recorded_fields import FIELDS, ComparedField, DecisionPair, Record, gate_kind

from .decisions import compare, compare_file
from .grid import RecordedGrid, decide, read_decisions, read_grid, recorded_device, recorded_problem
from .recorded_rows import ComparedCell, compare_rows, read_rows, sampled
from .report import AgreementTally, ConformanceReport, FieldDisagreement
from .rounding import compare_rounding, read_rounding

__all__ = [
    "FIELDS",
    "AgreementTally",
    "ComparedCell",
    "ComparedField",
    "ConformanceReport",
    "DecisionPair",
    "FieldDisagreement",
    "Record",
    "RecordedGrid",
    "compare",
    "compare_file",
    "compare_rounding",
    "compare_rows",
    "decide",
    "gate_kind",
    "read_decisions",
    "read_grid",
    "read_rounding",
    "read_rows",
    "recorded_device",
    "recorded_problem",
    "sampled",
]
