"""What a recording shows: rounds, the intervals in them, and a file for Perfetto."""
