"""What kernels compute, as data that needs no torch: the oracle's records and the runners' refusals derive from it."""
