"""Ranks talking to each other: validated settings, process group, fingerprints, poisoning, slice collectives."""
