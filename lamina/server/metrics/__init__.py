"""What operators see: metrics, health, the page."""
