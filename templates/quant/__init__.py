"""Quantization kernels that run before attention: the K mean, and INT8 codes of Q, K and V."""
