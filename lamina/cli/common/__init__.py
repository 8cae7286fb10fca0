"""Modules shared by sub-commands: flags, the parser, checks before a start, tables of memory."""
