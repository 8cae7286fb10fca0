"""Who may come in, and how much of a request is read: before anything of it is understood."""
