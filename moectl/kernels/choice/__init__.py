"""Which launch a layer's kernels take, and how long it should take: tiles, measured rows, the model of time.

Nothing here imports torch or triton: `moectl explain` asks the same questions as the kernels' host code.
"""
