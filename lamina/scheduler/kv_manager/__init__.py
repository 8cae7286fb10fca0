"""The KV blocks of sequences: which sequence has them, gets them next or shares them, and which pages are
offloaded.
"""
