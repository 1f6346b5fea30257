"""The tensors of these tests are small."""

from support.one_thread import one_thread  # noqa: F401
