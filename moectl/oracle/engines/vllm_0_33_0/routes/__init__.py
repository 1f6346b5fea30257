"""One module per family of formats: the checkpoints of each method, and its priority order of backends."""
