"""A directory of pages on disk: its owner, its index, its segments, and the keys that encrypt fragments.

    lock              held by every worker of the server that has the store open; contains the server's name
    secret            of the store, unless another file holds it (lamina.kv.page_keys)
    key-<tenant>      the tenant's data key, encrypted by the secret
    index.db          SQLite: pages, the records that hold their fragments, and segments
    segment-<number>  records, each of some fragments of one page; one worker writes it, all of them read it

The directory has mode 0700 and each file 0600. A record that is not in the index is free space.
"""
