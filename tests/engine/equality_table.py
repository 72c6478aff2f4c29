"""``python -m tests.engine.equality_table``: how equal trees and flat batches are, as a table (`make equality`)."""

from __future__ import annotations

from dataclasses import replace

from .model.test_tree_equals_flat import CONFIGS, make_models, random_tree
from .model.test_tree_objectives import AGGREGATIONS, LEVELS, Errors, compare, conversations


def main() -> None:
    print("fp32; logprob and worst gradient: relative norms; loss and worst metric: absolute")
    print(f"{'model':<24}{'objective':<20}{'aggregation':<26}" + "".join(f"{name:>11}" for name in Errors._fields))
    for model in CONFIGS:
        for level, objective in LEVELS.items():
            for aggregation in AGGREGATIONS if model == "qwen3" else ("token_mean",):
                trees = [random_tree(3, 4, 25), random_tree(4, 1, 3), conversations(0)]
                errors = compare(*make_models(model), trees, replace(objective, aggregation=aggregation))
                print(f"{model:<24}{level:<20}{aggregation:<26}" + "".join(f"{e:>11.1e}" for e in errors))


if __name__ == "__main__":
    main()
