"""`moectl tune`."""
