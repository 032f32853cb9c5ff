"""The hardware: what there is of it, and what a graph, a stream and an event are on it."""
