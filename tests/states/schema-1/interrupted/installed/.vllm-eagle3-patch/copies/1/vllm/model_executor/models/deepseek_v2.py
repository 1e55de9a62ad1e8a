class Model:
    """A look-alike."""
