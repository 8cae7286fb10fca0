"""A recorded run of Lamina itself: tables of what its operators took, and runs predicted by these."""
