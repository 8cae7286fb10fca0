"""The KV manager: allocation and sharing of KV blocks, prefix caching, and offloaded pages."""
