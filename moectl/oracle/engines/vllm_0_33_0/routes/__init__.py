"""One module for each family of formats: which checkpoints a method takes, and in which order it asks."""
