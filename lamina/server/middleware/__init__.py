"""Keys, names and limits of requests: all that is checked before a request is understood."""
