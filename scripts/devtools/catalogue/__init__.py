"""Catalogue entries made from descriptions of published checkpoints."""
