"""``lamina-launch``: the command line. One module a sub-command."""
