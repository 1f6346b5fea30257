"""`moectl convert`: options, planning, and output."""
