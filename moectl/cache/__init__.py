"""Measurements kept in the user's cache: tuned kernel launches, and times of backends.

Nothing here imports torch. The cache is optional: without it the defaults that moectl ships are used.
"""
