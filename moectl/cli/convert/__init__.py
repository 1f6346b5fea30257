"""`moectl convert`."""
