"""What moectl measured on a machine and keeps for its user: tuned launches, and times of backends.

Nothing here imports torch, and nothing here is needed: without the folder every choice is as shipped.
"""
