"""Language models whose mixers are grafts: what runs after export. Imports grafts, memory rules and kernels alone."""
