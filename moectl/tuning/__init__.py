"""Which launch of moectl's kernels is fastest for a layer on this device: cells, measuring, the search."""
