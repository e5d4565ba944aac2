"""Convolutions of small images in Triton, for the layers and GPUs at which they are faster than cuDNN."""
