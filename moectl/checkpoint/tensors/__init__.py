"""Expert tensors: the known formats and storages, and which of them a checkpoint's headers match."""
