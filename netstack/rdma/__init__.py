"""The transport ``verbs``: RDMA devices through libibverbs."""
