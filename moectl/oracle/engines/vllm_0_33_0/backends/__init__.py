"""One file per backend: a record of what it offers."""
