"""``lamina.wrap``: a Hugging Face model whose ``generate`` runs with attention on memory workers.

transformers itself prepares a call and refuses what it refuses: settings, special tokens, lengths, processors,
criteria. Then workers draw the tokens where they can (``drawing``); else this process chooses them, step by step
(``by_step``).
"""

from .wrapped_model import WrappedModel as WrappedModel
from .wrapped_model import wrap as wrap
