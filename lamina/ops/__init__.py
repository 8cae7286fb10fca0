"""Computation on tensors: attention, linear layers, collectives, sampling, programs on rows."""
