"""The columns of parquet files of rollouts that no tree declares."""

from __future__ import annotations

import pyarrow as pa

IDENTITY = pa.schema(
    {
        "step": pa.int32(),
        "prompt_id": pa.string(),
        "task": pa.string(),
        "leaf": pa.int32(),
        "prompt_text": pa.string(),
        "response_text": pa.string(),
        "prompt_ids": pa.list_(pa.int32()),
        "response_ids": pa.list_(pa.int32()),
        "node_ids": pa.list_(pa.int32()),
        "reward": pa.float32(),
        "status": pa.string(),
    }
)
"""The columns of every file; those of the trees follow, as lists of one entry a response token or one value a leaf."""

CALLS = pa.list_(
    pa.struct(
        {
            "number": pa.int32(),
            "role": pa.string(),
            "arrived": pa.float64(),
            "begun": pa.float64(),
            "first": pa.float64(),
            "ended": pa.float64(),
            "read": pa.int32(),
            "sampled": pa.int32(),
        }
    )
)
"""Calls of an agent's episode: seconds since it began, and numbers of tokens."""
