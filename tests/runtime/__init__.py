"""Proofs with a real vLLM in the loop: ``make test-runtime``, not a part of ``make test``."""
