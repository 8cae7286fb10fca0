"""A plan as text, as JSON, as a page with plots."""
