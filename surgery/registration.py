"""Makes transformers' Auto classes know the ``surgery_*`` model types."""


def register() -> None:
    """Register the model types, now if transformers is loaded, otherwise when it is."""
