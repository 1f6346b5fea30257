"""Bit-for-bit comparison of moectl's layouts with recorded conversions of other projects."""
