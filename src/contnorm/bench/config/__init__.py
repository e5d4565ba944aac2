"""Settings of a run: their schema, their sources, the defaults of streams and strategies, and one resolve step."""
