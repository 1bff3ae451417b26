"""Attention of a batch: which token sees which (layout.py), and the kernels that compute it (plan.py chooses them).

layout           the tokens of a batch in the order of the kernels: one document after another, no padding
document group   neighbouring tokens of the layout that see nothing outside: a document, or several short ones
query range      neighbouring queries of a group, the ranges of keys that they read, and their mask type
plan             the order of a batch's tokens and the way to compute its attention; made once, used by all layers
packed inputs    q, k and v of the same tokens as one tensor [T, 3, H, D]; in cross-attention the queries
                 [Tq, 1, H, D], and keys with values [Tk, 2, H, D]. H heads of this rank, D head size
"""
