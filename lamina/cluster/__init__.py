"""Starting and stopping workers; the command line."""
