"""Messages between the processes of one engine, and the facts that all of them share. No torch."""
