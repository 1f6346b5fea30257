"""Gluon kernels for Hopper (SM90): few (`stream`), some (`mid`), many (`prefill`) tokens per expert."""
