"""Helpers that several folders of tests share."""
