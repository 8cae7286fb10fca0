"""What an operator asks of a server that runs, or of the KV that one has stored."""
