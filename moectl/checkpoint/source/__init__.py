"""Opening checkpoints: from a directory, the Hugging Face Hub or its cache, or the built-in catalogue."""
