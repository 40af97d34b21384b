"""Which tile configuration a call takes: tables, and the tuner that writes them.

A choice never changes a result: a candidate must give the default configuration's bits before it
is timed (:mod:`sage_cute.tune.tuner`).
"""
