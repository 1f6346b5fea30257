"""MoE layers and their quantization as config.json declares them."""
