"""What to buy: what a deployment costs by a model of it, which one to take, and the figures of the paper by that."""
