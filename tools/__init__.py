"""Tools for those who work on this project; not installed."""
