"""Seeds of random numbers that have nothing to do with each other. Imports the standard library alone."""

from __future__ import annotations

import hashlib


def seed_of(*key: object) -> int:
    """A seed of 63 bits that follows from `key`: what is drawn from different ones differs."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
