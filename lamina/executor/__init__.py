"""Who starts the workers of an engine, meets them and watches them."""
