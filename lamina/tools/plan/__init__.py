"""Plans a purchase: the cost of deployments by a model, their ranking, and the paper's figures by the same model."""
