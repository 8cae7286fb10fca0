"""The transport ``gin``: kernels that put by NCCL's device API."""
