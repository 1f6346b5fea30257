"""Running one fused-MoE layer: the reference that judges, the runners, their kernels, timing.

`reference` is the judge; `registry.RUNNERS` names what can run a `prepared.PreparedMoE`; `tolerance`
says how far a result may be from the judge.
"""
