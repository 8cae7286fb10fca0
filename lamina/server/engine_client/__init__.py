"""The engine in a process of its own, and the server's end of the link to it."""
