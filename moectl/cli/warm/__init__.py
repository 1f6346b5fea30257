"""`moectl warm`."""
