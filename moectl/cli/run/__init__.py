"""`moectl run`."""
