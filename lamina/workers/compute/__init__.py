"""The compute worker and the prefill worker: they hold the weights and run the slices."""
