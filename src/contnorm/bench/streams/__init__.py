"""Streams: data sets as they are found on disk, and what a run sees of them, task after task."""
