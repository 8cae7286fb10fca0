"""A directory of pages on disk: whose it is, its index, its segments, and the keys that fragments are encrypted with.

    lock              held by every worker of the server that has the store open; the server's name stands in it
    secret            of the store, where no other file holds it (lamina.kv.page_keys)
    key-<tenant>      the tenant's data key, encrypted by the secret
    index.db          SQLite: pages, the records that hold their fragments, and segments
    segment-<number>  records, each of some fragments of one page; one worker writes it, all of them read it

The directory has mode 0700 and each file 0600. A record that the index does not know is free space.
"""
