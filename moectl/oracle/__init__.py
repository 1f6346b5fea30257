"""Choosing a backend: one function over tables of data."""
