"""Self-contained HTML pages on one run or several, from config.toml, metrics.jsonl and rollouts/*.parquet.

`run_data` reads a run's directory; `figures` makes plots and tables from its metrics, and `trees` the data of the tree
explorer from its rollouts; `page` (one run) and `compare` (several) fill a template with these, through `writing`.
Anything that a run did not record is named on the page. Read `page`, `run_data`, `figures`, `trees`.
"""

from .compare import write_comparison
from .page import write_report

__all__ = ["write_comparison", "write_report"]
