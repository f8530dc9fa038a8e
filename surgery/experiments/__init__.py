"""The papers' experiments and this project's own, each a command of ``surgery reproduce``."""
