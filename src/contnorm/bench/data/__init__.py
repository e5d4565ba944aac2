"""Data sets on disk: file formats, folders, downloads, decoded caches, and builders of multi-label sets."""
