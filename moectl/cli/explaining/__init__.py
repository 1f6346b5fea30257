"""What `moectl explain` shows: an explanation as sections of blocks."""
