"""The YAML recipes that ship; ``surgery recipes`` lists them."""
