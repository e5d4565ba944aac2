"""Experiments: data sets, streams, memories, strategies, networks, the engine, metrics, records and statistics."""
