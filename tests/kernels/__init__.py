"""Tests of running a layer."""
