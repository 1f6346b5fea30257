"""Kernels for Hopper (SM90) in Gluon: what few tokens, some and many per expert each need."""
