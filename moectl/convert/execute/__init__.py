"""A planned conversion carried out, layer by layer, resumable."""
