"""What a run looked like: spans that every process records, merged into one timeline, and what they say."""
