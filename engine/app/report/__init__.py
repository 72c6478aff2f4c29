"""report.html: one self-contained page on a run, from its config.toml, metrics.jsonl and rollouts/*.parquet."""

from .page import write_report

__all__ = ["write_report"]
