"""Programs on top of the product: plan, timeline, bench, check, drill, explain."""
