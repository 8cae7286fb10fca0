"""Three ways to serve the layer messages of a round: one native call, Python on the host, or kernels on a device."""
