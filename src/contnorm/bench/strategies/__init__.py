"""Strategies: learning methods that compute a loss from stream and memory samples.

A strategy computes the loss of a step; the engine draws the samples and updates the weights. A strategy declares how
many replay draws a step has, and decides which samples share a forward pass, since that changes batch statistics. Names
and summaries are in `contnorm.bench.strategies.registry`, which does not import torch.
"""
