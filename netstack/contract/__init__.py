"""What all transports keep to: the seam, what every channel and fabric shares, the cluster's key."""
