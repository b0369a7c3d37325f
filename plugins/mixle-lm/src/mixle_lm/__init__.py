"""Language models: token ids in, receipts out."""

from mixle_lm.corpus import Corpus, read_corpus
from mixle_lm.fit import FitResult, cosine_schedule
from mixle_lm.lm import LM
from mixle_lm.loader import RowBatch, RowLoader
from mixle_lm.losses import causal_lm_loss, last_token_loss
from mixle_lm.rows import IGNORED, Rows

__all__ = [
    "IGNORED",
    "LM",
    "Corpus",
    "FitResult",
    "RowBatch",
    "RowLoader",
    "Rows",
    "causal_lm_loss",
    "cosine_schedule",
    "last_token_loss",
    "read_corpus",
]
