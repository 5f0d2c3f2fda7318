"""The package's version. It imports nothing, so every module can import it."""

__version__ = "0.1.0"
