"""`moectl explain`."""
