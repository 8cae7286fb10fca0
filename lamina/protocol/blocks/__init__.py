"""The KV blocks that sequences hold: counts and ids. Driver and memory workers count alike."""
