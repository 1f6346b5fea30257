"""What the compiler made of the kernels, for any GPU, on a machine without one."""
