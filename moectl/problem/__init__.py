"""Descriptions of MoE layers: the problem, number formats, layouts and sizes. Does not import torch."""
