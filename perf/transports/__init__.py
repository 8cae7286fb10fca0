"""Who plays ping-pong, and how it is drawn."""
