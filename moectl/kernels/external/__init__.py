"""Backends that run the kernels of other libraries: FlashInfer, Marlin from vLLM, Humming, triton_kernels."""
