# vllm-eagle3-patch: a-patch
class Model:
    """A look-alike."""
