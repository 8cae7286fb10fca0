"""What the processes of one engine tell each other, and the facts that all of them go by. No torch."""
