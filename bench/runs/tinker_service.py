"""``rolltree bench tinker MODEL``: the training service through Tinker's client, beside the same work without it.

A server of the model runs as a process of its own. What is timed at the client: a step on responses to one prompt, the
same data one request each, ``optim_step`` alone, and many clients at once. The step is also computed in this process
by the functions that the server calls; the difference is what the protocol takes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from rolltree.engine import UserError
from rolltree.engine.model.loading import choose_device, load_model, load_tokenizer
from rolltree.engine.rollout import NativeEngine
from rolltree.engine.tinker.adapters import Adapters, Lora
from rolltree.engine.tinker.compute import differentiate, shares
from rolltree.engine.tinker.losses import LOSSES
from rolltree.engine.tinker.training import new_trainer
from rolltree.engine.tinker.wire import Datum
from rolltree.kernels import TermsLossOutput

RANK = 16


def main(argv: Sequence[str]) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="rolltree bench tinker", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="Hugging Face directory")
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens of the prompt (default 512)")
    parser.add_argument("--responses", type=int, default=8, metavar="N", help="responses to it (default 8)")
    parser.add_argument("--length", type=int, default=64, metavar="N", help="tokens of a response (default 64)")
    parser.add_argument("--clients", type=int, default=16, metavar="N", help="clients at once (default 16)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="repetitions (default 3)")
    args = parser.parse_args(argv)
    draw = np.random.default_rng(0)
    prompt = draw.integers(1000, 30000, args.prompt)
    data = [np.concatenate([prompt, draw.integers(1000, 30000, args.length)]).tolist() for _ in range(args.responses)]
    try:
        with _served(args.model) as url:
            _steps(url, args.model, data, args.length, args.rounds)
            _clients(url, Path(args.model).resolve().name, args.clients)
    except UserError as error:
        print(f"rolltree bench tinker: {error}", file=sys.stderr)
        return 2
    return 0


@contextmanager
def _served(model: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as states:
        command = [sys.executable, "-m", "rolltree.engine.app.cli", "serve", model, "--dtype", "float32", "--port", "0"]
        command += ["--tinker", "--tinker_dir", states]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            try:
                said = ""
                for said in server.stderr:
                    if "serving at " in said:
                        break
                else:
                    raise UserError(f"the server of '{model}' ended: {said.strip()}")
                yield said.partition("serving at ")[2].strip().removesuffix("/v1")
            finally:
                server.terminate()


def _datum(ids: list[int], trained: int) -> Any:
    from tinker import types

    targets = len(ids) - 1
    inputs = {
        "target_tokens": ids[1:],
        "logprobs": [0.0] * targets,
        "advantages": [0.0] * (targets - trained) + [1.0] * trained,
    }
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def _steps(url: str, model: str, data: list[list[int]], trained: int, rounds: int) -> None:
    import tinker

    client = tinker.ServiceClient(base_url=url, api_key="tml-bench")
    training = client.create_lora_training_client(Path(model).resolve().name, RANK, seed=0).result()
    sent, adam = [_datum(ids, trained) for ids in data], tinker.types.AdamParams(learning_rate=1e-5)

    def together() -> None:
        training.forward_backward(sent, "importance_sampling")
        training.optim_step(adam).result()

    def one_by_one() -> None:
        for each in sent:
            training.forward_backward([each], "importance_sampling")
        training.optim_step(adam).result()

    def one_step() -> None:
        training.optim_step(adam).result()

    def again() -> None:  # so that there are gradients
        training.forward_backward([_datum(data[0][-8:], 4)], "importance_sampling").result()

    inside = _direct(model, data, trained)
    work: dict[str, Callable[[], None]] = {"together": together, "inside": inside, "one by one": one_by_one}
    seconds: dict[str, list[float]] = {name: [] for name in [*work, "optim_step"]}
    for run in (together, inside):
        run()  # once for what is made at the first call
    for _ in range(rounds):  # interleaved, so that a change of the machine's speed meets all
        for name, run in work.items():
            seconds[name].append(_seconds(run))
        again()
        seconds["optim_step"].append(_seconds(one_step))
    _say("a step on all data", seconds["together"])
    _say("the same without the protocol", seconds["inside"])
    _say("one datum a request", seconds["one by one"])
    _say("optim_step alone", seconds["optim_step"])
    pairs = [a / b for a, b in zip(seconds["together"], seconds["inside"], strict=True)]
    print(f"overhead of the protocol: {100 * (median(pairs) - 1):.1f} % ({_range(100 * (p - 1) for p in pairs)})")
    speed = [a / b for a, b in zip(seconds["one by one"], seconds["together"], strict=True)]
    print(f"together against one by one: {median(speed):.2f} x ({_range(speed)})", flush=True)
    client.holder.close()


def _direct(model: str, data: list[list[int]], trained: int) -> Callable[[], None]:
    """Return the step as the server computes it, in this process."""
    engine = NativeEngine(load_model(model, device=choose_device("auto")), load_tokenizer(model))
    adapters = Adapters(engine, None)  # type: ignore[arg-type]  # nothing is lent
    name = adapters.create(Lora(RANK, 0))
    trainer = new_trainer(adapters, name)
    trainer.config = replace(trainer.config, lr=1e-5)
    loss = LOSSES["importance_sampling"].with_config({})
    datums = []
    for ids in data:
        advantage = np.zeros(len(ids) - 1, np.float32)
        advantage[-trained:] = 1.0
        inputs = {"target_tokens": np.array(ids[1:]), "logprobs": 0 * advantage, "advantages": advantage}
        datums.append(Datum(np.array(ids[:-1], np.int32), inputs))

    def step() -> None:
        for part in shares(datums):
            with adapters.training(name) as parameters:
                scored, gradients = differentiate(adapters.model, part, loss, datums, parameters)
            trainer.accumulate(partial(_given, parameters, gradients, scored.loss))
        trainer.optim_step()

    return step


def _given(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], loss: float) -> TermsLossOutput:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    return TermsLossOutput(torch.tensor(loss, dtype=torch.float64), {}, {})


def _clients(url: str, name: str, count: int) -> None:
    """Time clients with keys of their own, each with a small step and a sample, alone and all at once."""
    import tinker

    clients = []
    for i in range(count):
        client = tinker.ServiceClient(base_url=url, api_key=f"tml-bench-{i}")
        clients.append((client, client.create_lora_training_client(name, 4, seed=i).result()))
    adam, params = tinker.types.AdamParams(learning_rate=1e-4), tinker.types.SamplingParams(max_tokens=8, stop=[])

    def turn(training: Any) -> None:
        training.forward_backward([_datum(list(range(1000, 1033)), 8)], "importance_sampling")
        training.optim_step(adam).result()
        sampler = training.save_weights_and_get_sampling_client().result()
        sampler.sample(tinker.types.ModelInput.from_ints(list(range(1000, 1016))), 1, params).result()

    alone = [_seconds(partial(turn, training)) for _, training in clients]
    with ThreadPoolExecutor(count) as pool:
        begin = time.perf_counter()
        each = list(pool.map(lambda one: _seconds(partial(turn, one[1])), clients))
        whole = time.perf_counter() - begin
    print(f"{count} clients one after another: {sum(alone):.2f} s, {_range(alone)} each")
    print(f"{count} clients at once: {whole:.2f} s, {_range(each)} each", flush=True)
    for client, _ in clients:
        client.holder.close()


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _say(name: str, seconds: Sequence[float]) -> None:
    print(f"{name}: {median(seconds):.3f} s ({_range(seconds)})")


def _range(values: Any) -> str:
    numbers = list(values)
    return f"{min(numbers):.2f} to {max(numbers):.2f}"
