"""Export a run as an ordinary Hugging Face checkpoint."""
