"""The transport ``mlx5``: kernels of a GPU that drive a ConnectX."""
