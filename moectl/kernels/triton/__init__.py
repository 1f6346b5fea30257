"""moectl's own GPU kernels, in Triton, on the layout ``moectl-mtile64``."""
