"""A user's package."""
