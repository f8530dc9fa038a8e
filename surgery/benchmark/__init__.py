"""How fast whole models train and decode on this machine's GPU, swapped and unswapped, with random weights.

    __main__.py    python -m surgery.benchmark: rows in a process of their own, figures as they come
    rows.py        the rows by name
    models.py      the shapes, and models of them
    measures.py    one function for each kind of row
"""
