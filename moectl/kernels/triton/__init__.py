"""moectl's own GPU kernels, in Triton, on the layouts ``moectl-mtile64`` and ``marlin-int4``."""
