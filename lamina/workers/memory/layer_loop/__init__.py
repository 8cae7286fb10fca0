"""The ways in which a round's layer messages are served: by one native call, by Python on hosts, or on a device."""
