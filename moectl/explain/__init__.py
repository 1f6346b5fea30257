"""Which backend each layer group of a checkpoint gets, and why: checkpoint and oracle, joined."""

from .explanation import Explanation, GroupExplanation, Memory, explain
from .facts import facts, source_of

__all__ = ["Explanation", "GroupExplanation", "Memory", "explain", "facts", "source_of"]
