"""Texts, records, tokens and windows: the reading that every job shares.

    specification -> Source (sources) -> records or documents (rows) -> tokens -> packed windows (packing, instruction)
"""
