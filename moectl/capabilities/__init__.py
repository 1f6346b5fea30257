"""What kernels compute, as data without torch: the oracle's records and the runners' refusals use it."""
