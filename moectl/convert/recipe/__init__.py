"""How canonical tensors become stored ones and back: chains of steps, one recipe per layer."""
