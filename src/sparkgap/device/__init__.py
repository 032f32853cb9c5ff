"""Streams, events and graphs of each device."""
