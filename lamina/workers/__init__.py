"""The processes of the compute, prefill and memory workers, and the messages between them."""
