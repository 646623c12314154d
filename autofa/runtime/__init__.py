"""The operator that runs kernels: its library, its C surface, and torch's devices and tensors.

Importing this package loads neither torch nor the library.
"""
