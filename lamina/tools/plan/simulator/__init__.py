"""The conductor on a virtual clock: prefill workers, their stores and transfers, and instances that decode."""
