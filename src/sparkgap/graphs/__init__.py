"""Captured passes: what they are bound to, how they are counted, and the three families."""
