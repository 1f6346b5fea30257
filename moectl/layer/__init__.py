"""One MoE layer from any source, prepared for a backend and built into a kernel."""
