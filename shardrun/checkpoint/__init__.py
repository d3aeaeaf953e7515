"""Directories that are published by one rename, refused when damaged, and explained without loading."""
