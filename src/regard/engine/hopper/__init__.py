"""Regard's own kernel for NVIDIA's Hopper, in Pallas Mosaic GPU."""
