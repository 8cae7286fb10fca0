"""The competitors of the ping-pong, and its drawings."""
