"""Analysis of a trace: how busy each pool was, and a page that draws it."""
