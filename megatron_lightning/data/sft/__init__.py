"""Supervised fine-tuning data: chat formats, chat templates, loss masks, packing."""

from megatron_lightning.data.sft.chat_template import ChatTemplate, Rendered
from megatron_lightning.data.sft.conversations import (
    Conversation,
    PromptCompletion,
    detect_format,
    read_example,
)
from megatron_lightning.data.sft.dataset import PackedDataset, PackingStatistics
from megatron_lightning.data.sft.documents import Documents, load_documents
from megatron_lightning.data.sft.encode import Encoded, ExampleEncoder
from megatron_lightning.data.sft.module import SFTDataModule
from megatron_lightning.data.sft.packing import Packs, pack
from megatron_lightning.data.sft.records import RecordSource
from megatron_lightning.data.sft.template_files import load_chat_template

__all__ = [
    "ChatTemplate",
    "Conversation",
    "Documents",
    "Encoded",
    "ExampleEncoder",
    "PackedDataset",
    "PackingStatistics",
    "Packs",
    "PromptCompletion",
    "RecordSource",
    "Rendered",
    "SFTDataModule",
    "detect_format",
    "load_chat_template",
    "load_documents",
    "pack",
    "read_example",
]
