"""Tensor and sequence parallelism on local tensors with explicit autograd collectives."""
