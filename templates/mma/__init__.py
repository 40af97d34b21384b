"""Tensor-core instructions and the layouts they demand."""
