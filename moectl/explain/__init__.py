"""Which backend each layer group of a checkpoint gets, and why."""

from .deployment import StepTimes, WeightMemory
from .explanation import Explanation, GroupExplanation, OtherAnswer, Question, explain
from .problem_facts import facts, source_of
from .rank_memory import RankMemory

__all__ = [
    "Explanation",
    "GroupExplanation",
    "OtherAnswer",
    "Question",
    "RankMemory",
    "StepTimes",
    "WeightMemory",
    "explain",
    "facts",
    "source_of",
]
