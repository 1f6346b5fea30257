"""Verifying a converted directory and restoring its source bit for bit."""
