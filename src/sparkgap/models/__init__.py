"""What networks compute, written in `ops` only."""
