"""Device functions that kernels share. They know nothing of pipelines and warp roles."""
