"""Make EAGLE-3 speculative decoding work on the vLLM that is already installed."""

__version__ = "0.1.0"
