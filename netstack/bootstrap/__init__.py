"""How peers meet on a stream socket: dial, listen, authenticate, swap cards, watch for each other's end."""
