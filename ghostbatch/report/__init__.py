"""Reads run folders; writes tables, figures and one HTML page."""
