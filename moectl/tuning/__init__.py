"""The search for the fastest launch configuration of moectl's kernels for a layer on this device."""
