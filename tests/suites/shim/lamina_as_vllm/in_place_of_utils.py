"""Copied over vLLM's ``tests/utils.py``."""

import sys

from lamina_as_vllm import utils

sys.modules[__name__] = utils
