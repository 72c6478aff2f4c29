"""The process of another checkout: it makes one provider's calls there, and times each when it is told to.

``python FILE OP PROVIDER DEVICE QUICK`` runs this file by its path, with the other checkout first on the path of
modules: of that it uses ``rolltree.bench.cli.load`` alone, so that any commit since then can be measured. Requests and
answers are lines of JSON: ``{"case": name, "shape": text or null}`` makes a case and answers ``{"directions": [...]}``,
``{"time": direction}`` answers ``{"ms": ...}``, ``{"peak": direction}`` answers ``{"mib": ...}``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def beside(name: str) -> Any:
    """Return a module of this file's own folder, which is not the package's of that name here."""
    spec = importlib.util.spec_from_file_location(f"served_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Served:
    """The calls of the newest case."""

    def __init__(self, op: str, provider: str, device: str, quick: bool) -> None:
        import torch

        from rolltree.bench.cli import load

        self.bench, self.provider, self.quick = load(op), provider, quick
        self.device, self.timing = torch.device(device), beside("timing")
        self.clock = self.timing.clock_of(self.device)
        self.calls: dict[str, Callable[[], object]] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if "time" in request:
            return {"ms": self.clock.time(self.calls[request["time"]])}
        if "peak" in request:
            return {"mib": self.timing.peak_memory_mib(self.calls[request["peak"]], self.device)}
        return {"directions": self.made(request["case"], request["shape"])}

    def made(self, name: str, shape: str | None) -> list[str]:
        """Make the calls of a case, call each once, and return their directions."""
        self.calls.clear()
        bench = self.bench
        if shape is not None:
            from rolltree.bench.shapes import with_shapes  # an older commit without it is told as such

            bench = with_shapes(bench, [shape])
        make = {case.name: case.make for case in bench.cases(self.device, self.quick)}
        if name not in make or self.provider not in bench.providers:
            raise LookupError(f"that commit has no case '{name}' of provider '{self.provider}'")
        for direction, call in bench.providers[self.provider](make[name]()).items():
            call()
            if bench.replayed and self.device.type == "cuda":
                try:
                    call = self.timing.replay(call)
                except self.timing.GraphError:
                    direction += ", launched"
            self.calls[direction] = call
        return list(self.calls)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the checkout prints is no answer
    op, provider, device, quick = sys.argv[1:]
    served = Served(op, provider, device, quick == "quick")
    for line in sys.stdin:
        try:
            answer = served.answer(json.loads(line))
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            answer = {"error": f"{type(error).__name__}: {reason}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
