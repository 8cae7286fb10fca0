"""``lamina.wrap``: a Hugging Face model whose ``generate`` runs with attention on memory workers.

transformers itself prepares a call and checks its settings, special tokens, lengths, processors and criteria. Then
workers draw the tokens if they can (``drawing``); otherwise this process chooses them, step by step (``by_step``).
"""

from .structured_outputs_processor import StructuredOutputsProcessor as StructuredOutputsProcessor
from .wrapped_model import WrappedModel as WrappedModel
from .wrapped_model import wrap as wrap
