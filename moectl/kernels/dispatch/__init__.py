"""What stands around a layer's experts: quantizing tokens, bringing those of all ranks together, batches.

`prepare.PrepareFinalize` does it for one kernel; `exchange` has the ways in which ranks share a layer.
"""
