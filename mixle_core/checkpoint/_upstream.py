"""The names of torch, some of them private, that stand in checkpoints of torch.distributed.checkpoint: read as text, never imported.

A newer torch that writes other names is refused with the name; they are then added here, with what they stand for.
"""

from __future__ import annotations

import torch

TESTED = ("2.11", "2.14")
"""Oldest and newest torch minor version whose files these names were read in."""

_PLANNED = "torch.distributed.checkpoint.metadata"

METADATA_RECORDS = {
    (_PLANNED, "Metadata"),
    (_PLANNED, "TensorStorageMetadata"),
    (_PLANNED, "BytesStorageMetadata"),
    (_PLANNED, "ChunkStorageMetadata"),
    (_PLANNED, "TensorProperties"),
    (_PLANNED, "MetadataIndex"),
    (_PLANNED, "StorageMeta"),
    (_PLANNED, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
"""In `.metadata`: (module, name) of what is kept as a record of its parts."""

TENSOR_RECORDS = {("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")}
"""In the data of an entry: how torch.save writes a tensor."""

BYTES_RECORDS = {("_codecs", "encode")}
"""In the data of an entry: how pickle of protocol 2, which torch.save uses, writes bytes."""

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
}
"""In module `torch`: dtype of the elements of a storage."""

UNTYPED_STORAGE = ("torch.storage", "UntypedStorage")

DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
"""In module `torch`, by name."""
