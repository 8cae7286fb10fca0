"""Requests that follow one another: named sessions, whose turn it is, and what outgrows the context."""
