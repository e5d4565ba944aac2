"""Settings of a run: their schema and text, the defaults of streams and strategies, and one resolve step."""
