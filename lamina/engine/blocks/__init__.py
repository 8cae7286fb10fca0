"""The KV blocks of sequences: whose they are, who gets them, who shares them, and what is kept beside them."""
