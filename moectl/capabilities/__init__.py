"""What kernels support, as data shared by the oracle and the kernels. Does not import torch."""
