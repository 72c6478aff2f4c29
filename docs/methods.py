"""Writes methods.md, every recipe with its papers, from the files of `engine/recipes`: ``python docs/methods.py``."""

from __future__ import annotations

from pathlib import Path

from rolltree.engine.app.recipes import Recipe, read_recipe, recipe_names

PAGE = Path(__file__).with_name("methods.md")
HEAD = """# Methods

A recipe is a published method by name: `recipe = "dapo"` in a run's TOML, or `--recipe dapo`. It gives the keys of the
method, each of which the file or the command line may change: defaults < recipe < file < flags, key by key. Lists of
tables (`reward.shaping`, `algorithm.terms`, `reward.parts`) are combined by `name`; an empty list takes the recipe's
tables away. Where the file or a flag replaces a part, such as `algorithm.objective`, the recipe's options of the old
part go with it. `rolltree train CONFIG --dry-run` says which keys a run has from its recipe; `config.toml` in the run's
directory has all keys written out, so that a run resumes from it exactly, whatever becomes of the recipe.

`rolltree methods NAME` shows a recipe or a part: formula, source, what is inferred, keys. `rolltree methods --papers`
lists papers with their recipes. arXiv numbers are given where they were looked up.

A formula is of the loss, which is minimised: r is the ratio of probabilities to the old policy, A the advantage, R the
reward, mu and sd their mean and standard deviation in a group, sg a stop of the gradient. *Inferred* marks what neither
a paper, an abstract nor public code states.

This page is generated from `engine/recipes`. `make methods` lets recipes train a tiny model: it compares gradients,
credit, rewards, selections, or the problems and numbers of responses that were chosen with the formulas; of the others
it sees that the policy changes. `tool_turns`, `ghpo`, `scale_rl`, `areal`, `asyncflow` and `april` are read only, their
parts have tests of their own. It also compares all objectives, credits, shapings and selections with each other: none
behaves like another, unless `rolltree methods` says that it is the same.
"""


def page() -> str:
    """The page."""
    lines = [HEAD, "| recipe | paper | formula | source | inferred | keys |", "|---|---|---|---|---|---|"]
    recipes = [read_recipe(name) for name in recipe_names()]
    lines += [row(recipe) for recipe in recipes]
    lines += ["", "## Papers", "", "| paper | recipe |", "|---|---|"]
    papers = sorted((str(p), recipe.name) for recipe in recipes for p in recipe.papers)
    lines += [f"| {cell(paper)} | `{name}` |" for paper, name in sorted(papers, key=lambda pair: pair[0].casefold())]
    return "\n".join(lines) + "\n"


def row(recipe: Recipe) -> str:
    keys = "; ".join(line for line in recipe.toml.splitlines() if line)
    needs = f" Needs {recipe.about['needs']}." if "needs" in recipe.about else ""
    equal = f" Equal to {recipe.about['equal']}." if "equal" in recipe.about else ""
    cells = (
        f"`{recipe.name}`", str(recipe.papers[0]), recipe.about["formula"] + needs + equal, recipe.about["source"],
        recipe.about.get("inferred", ""), f"`{keys}`",
    )  # fmt: skip
    return "| " + " | ".join(map(cell, cells)) + " |"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
