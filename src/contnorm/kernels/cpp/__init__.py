"""Kernels in C++, which are compiled on first use, and the builder that compiles and caches them."""
