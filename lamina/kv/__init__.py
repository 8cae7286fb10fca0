"""The KV cache: tensors of a memory worker's pool, forms in which K and V are stored, and storage of offloaded
pages.
"""
