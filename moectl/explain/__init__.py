"""Which backend each layer group of a checkpoint gets, and why: checkpoint and oracle, joined."""

from .deployment import Floors, Memory
from .explanation import Explanation, GroupExplanation, OtherAnswer, Question, explain
from .facts import facts, source_of

__all__ = [
    "Explanation",
    "Floors",
    "GroupExplanation",
    "Memory",
    "OtherAnswer",
    "Question",
    "explain",
    "facts",
    "source_of",
]
