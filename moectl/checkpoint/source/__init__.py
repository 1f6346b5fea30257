"""Where a checkpoint comes from: a directory, the Hub or its cache, the built-in catalogue."""
