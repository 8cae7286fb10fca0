"""Cuts a captured model at an opaque operator into slices. Imports torch, never the rest of lamina."""

if __name__ != "lamina.converter":
    raise ImportError("import lamina.converter, not the top-level folder converter/")
