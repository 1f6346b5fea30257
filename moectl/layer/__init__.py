"""One MoE layer, wherever its weights are stored."""
