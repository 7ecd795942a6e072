"""Weights that leave a device and come back to other pages, while the module that computes with them stays as it is."""
