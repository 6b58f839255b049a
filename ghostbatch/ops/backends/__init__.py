"""The code that computes ghost norm: tensor code for any device, and kernels for some."""
