"""Recorded conversions of other projects, compared bit for bit with the layouts of moectl."""
