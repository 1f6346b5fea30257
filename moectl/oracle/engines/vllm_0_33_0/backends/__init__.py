"""One file per backend: what each experts class supports."""
