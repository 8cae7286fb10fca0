"""Facts about devices, hosts and workers, and their text. No torch here."""
