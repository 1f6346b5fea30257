"""Reading, converting and writing batches of experts: pipeline, devices, progress log."""
