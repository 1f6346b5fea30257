"""What kernels of others and our own can do, as data that the oracle and the kernels both read."""
