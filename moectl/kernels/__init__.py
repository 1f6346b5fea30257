"""Running one fused-MoE layer: the reference, the runners with their kernels, and timing.

`reference` computes the result that others are checked against, `registry.RUNNERS` lists the backends that
can run a `prepared_layer.PreparedMoE`, and `tolerance` has the largest errors that pass.
"""
