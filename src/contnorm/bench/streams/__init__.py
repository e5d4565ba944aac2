"""Streams of tasks over data sets, the storage of their images, and the transforms of their samples."""
