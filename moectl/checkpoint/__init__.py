"""Reading checkpoints: config, quantization description and safetensors headers, no weights."""
