"""Tokenizers for preprocessing and for reading text back."""

from megatron_lightning.data.tokenizer.base import (
    BYTES,
    END_OF_TEXT,
    ByteTokenizer,
    NamedTokens,
    Tokenizer,
)
from megatron_lightning.data.tokenizer.fast import FileTokenizer, special_tokens
from megatron_lightning.data.tokenizer.load import load_tokenizer, tokenizer_file
from megatron_lightning.data.tokenizer.sentence_piece import SentencePieceTokenizer
from megatron_lightning.data.tokenizer.tiktoken_file import TiktokenTokenizer
from megatron_lightning.data.tokenizer.train import train_byte_bpe

__all__ = [
    "BYTES",
    "END_OF_TEXT",
    "ByteTokenizer",
    "FileTokenizer",
    "NamedTokens",
    "SentencePieceTokenizer",
    "TiktokenTokenizer",
    "Tokenizer",
    "load_tokenizer",
    "special_tokens",
    "tokenizer_file",
    "train_byte_bpe",
]
