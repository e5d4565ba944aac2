"""Networks of the paper, with a configurable norm, and loading of pretrained weights."""
