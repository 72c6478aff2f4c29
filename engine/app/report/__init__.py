"""Self-contained pages on a run, from its config.toml, metrics.jsonl and rollouts/*.parquet, or on several."""

from .compare import write_comparison
from .page import write_report

__all__ = ["write_comparison", "write_report"]
