"""Streaming of expert batches: reading, conversion on a device, and the pipeline of threads between them."""
