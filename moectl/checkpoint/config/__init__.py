"""What config.json says about MoE layers and their quantization."""
