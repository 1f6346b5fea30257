"""Expert tensors: which formats and storages there are, and which of them a checkpoint's headers show."""
