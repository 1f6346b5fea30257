"""`moectl bench`."""
