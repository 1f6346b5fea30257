"""Reading untrusted files with checks, and writing files atomically. Does not import torch."""
