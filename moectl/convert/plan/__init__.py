"""Plans of conversions, made from tensor headers alone: what is read, what is written, and the sizes."""
