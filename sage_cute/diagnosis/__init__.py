"""Whether INT8 attention will hold for a model: every attention call of a step, beside the truth.

``record`` finds the calls, ``measure`` compares one of them, ``verdict`` puts the figures into
words, ``report`` into a table, JSON and a heat map; ``run`` puts them together.
"""

from sage_cute.diagnosis.measure import Errors
from sage_cute.diagnosis.report import Diagnosis, Layer
from sage_cute.diagnosis.run import diagnose

__all__ = ["Diagnosis", "Errors", "Layer", "diagnose"]
