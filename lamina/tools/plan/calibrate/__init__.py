"""Tables of operators' times from a recorded run of Lamina itself, and runs predicted from them."""
