"""The meeting of peers on a stream socket: connect, listen, authenticate, exchange cards, notice the other's end."""
