"""What kernels compute and what their libraries hold, as data that the oracle and the kernels both read."""
