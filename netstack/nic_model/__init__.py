"""The software NIC: for tests, work requests of an mlx5 NIC that a thread of this host executes."""
