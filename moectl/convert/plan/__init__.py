"""A conversion decided from headers alone: what is read and written, and how much of everything."""
