"""Plans, their compilation and the launch of kernels. Importing this imports no cutlass."""
