"""Saved states outlive the process, and only their owner can reach them."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rolltree.engine.app.cli import main
from rolltree.engine.rollout import EngineConfig, NativeEngine

from ...support.forks import forked
from ...support.serving import make_engine, model, save, tokenizer
from .served import client, close_clients, example, serving, tinker, tokens, types

from rolltree.engine.tinker.faults import FaultError  # isort: skip
from rolltree.engine.tinker.store import Store  # isort: skip
from tinker.lib.retryable_exception import RetryableException  # isort: skip

IDS = [10, 200, 31, 42, 53, 64, 75, 86, 97, 108]
RUN = f"{'0' * 32}:train:0"
ADAM = types.AdamParams(learning_rate=1e-2)
SMALL = types.AdamParams(learning_rate=1e-3)


# -- the directory -----------------------------------------------------------------------------------------------------


def written(text: str) -> Any:
    def write(directory: Path) -> dict[str, Any]:
        (directory / "file").write_text(text)
        return {"base_model": "tiny"}

    return write


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path, clock=lambda: made.now if hasattr(made, "now") else 0.0)
    made.write_run(RUN, {"owner": "me", "created": 1.0})
    return made


def kept(store: Store, name: str = "a") -> str:
    return (store.find(f"tinker://{RUN}/weights/{name}", "me").place / "file").read_text()


def test_a_checkpoint_belongs_to_its_owner(store: Store) -> None:
    path = store.save(RUN, "weights", "a", written("one"), ttl=None, user_metadata={"step": "3"}).path
    assert path == f"tinker://{RUN}/weights/a"
    assert store.find(path, "me").meta["user_metadata"] == {"step": "3"}
    for wrong, owner in (
        (path, "you"),
        (f"{path}b", "me"),
        (f"tinker://{RUN}/weights/..", "me"),
        (f"tinker://{RUN}/weights/a/file", "me"),
        ("tinker://../../x/weights/a", "me"),
        ("/etc/passwd", "me"),
        ("", "me"),
    ):
        with pytest.raises(FaultError, match="There is no checkpoint"):
            store.find(wrong, owner)
    for name in ("", ".", "..", "a/b", "../a", ".new-1", "x" * 129, "a\n"):
        with pytest.raises(FaultError, match="has other characters"):
            store.save(RUN, "weights", name, written("x"), ttl=None, user_metadata=None)


def test_a_checkpoint_expires(store: Store) -> None:
    store.now = 1000.0  # type: ignore[attr-defined]
    one = store.save(RUN, "weights", "a", written("one"), ttl=3600, user_metadata=None)
    store.save(RUN, "weights", "b", written("two"), ttl=None, user_metadata=None)
    store.now = 4599.0  # type: ignore[attr-defined]
    assert kept(store) == "one"
    assert not store.expired()
    store.now = 4600.0  # type: ignore[attr-defined]
    with pytest.raises(FaultError):
        kept(store)
    assert [c.name for c in store.checkpoints(RUN)] == ["b"]
    assert [c.name for c in store.expired()] == ["a"]
    store.set_ttl(one, None)
    assert kept(store) == "one"
    for ttl in (0, 3599, -1, 10**9):
        with pytest.raises(FaultError, match="ttl_seconds is"):
            store.set_ttl(one, ttl)


def test_a_name_is_given_once_unless_it_may_be_replaced(store: Store) -> None:
    store.save(RUN, "weights", "a", written("one"), ttl=None, user_metadata=None)
    with pytest.raises(FaultError, match="already"):
        store.save(RUN, "weights", "a", written("two"), ttl=None, user_metadata=None)
    assert kept(store) == "one"
    store.save(RUN, "weights", "a", written("two"), ttl=None, user_metadata=None, overwrite=True)
    assert kept(store) == "two"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_that_ends_at_any_call_leaves_the_old_or_the_new_state(
    store: Store, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of the system is the last one once."""
    if overwrite:
        store.save(RUN, "weights", "a", written("old"), ttl=None, user_metadata=None)

    class Killed(BaseException):
        pass

    calls = [(module, name) for module in (os,) for name in ("rename", "replace", "fsync", "open")]
    seen = []
    for last in range(40):
        count = 0

        def counted(real: Any, last: int = last) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count > last:
                    raise Killed
                return real(*args, **kwargs)

            return call

        place = store.root / "runs" / RUN / "weights"
        with monkeypatch.context() as patched:
            for module, name in calls:
                patched.setattr(module, name, counted(getattr(module, name)))
            patched.setattr("rolltree.engine.tinker.store._remove", counted(lambda path: None))
            try:
                store.save(
                    RUN, "weights", "a", written(f"new {last}"), ttl=None, user_metadata=None, overwrite=overwrite
                )
                ended = True
            except Killed:
                ended = False
        store = Store(store.root, clock=store.clock)  # which recovers
        assert not [entry for entry in place.iterdir() if entry.name.startswith(".")]
        found = kept(store) if (place / "a").exists() else None
        seen.append(found)
        assert found in {None if not overwrite else "old", *(f"new {i}" for i in range(last + 1))}
        if ended:
            assert found == f"new {last}"
            break
        if not overwrite and found is not None:
            break  # it was saved, though nobody was told
    else:
        raise AssertionError("the save never ended")
    assert len(seen) > 5
    assert found != "old"


# -- the process -------------------------------------------------------------------------------------------------------


def serve(directory: Path, states: Path, port: int) -> None:
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    command = [
        "serve",
        str(directory),
        "--name",
        "tiny",
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--kv_tokens",
        "4096",
    ]
    main([*command, "--port", str(port), "--tinker", "--tinker_dir", str(states)])


@contextmanager
def process(directory: Path, states: Path, port: int) -> Iterator[Any]:
    """`rolltree serve --tinker`, once it answers."""
    with forked(serve, directory, states, port) as (child, printed):
        said = ""
        while "serving at " not in said:
            said = printed.readline()
            assert said, "the server ended"
        yield child


@pytest.fixture
def port() -> Iterator[int]:
    """A free port; the clients of the server there are closed at the end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        found = int(listening.getsockname()[1])
    yield found
    close_clients(f"http://127.0.0.1:{found}")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"))


@pytest.mark.check
def test_a_killed_server_comes_back_with_what_was_saved(directory: Path, tmp_path: Path, port: int) -> None:
    with process(directory, tmp_path, port) as child:
        service = client(f"http://127.0.0.1:{port}")
        trained = service.create_lora_training_client("tiny", rank=4, seed=1).result()
        trained.forward_backward([example(IDS, 5)], "cross_entropy").result()
        trained.optim_step(ADAM).result()
        state = trained.save_state("one", user_metadata={"step": "1"}).result().path
        sampler = trained.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=5, seed=1, stop=[])
        before = sampler.sample(tokens(IDS), 2, params).result()
        lost = trained.forward_backward([example(IDS, 5)] * 40, "cross_entropy")
        time.sleep(0.02)
        os.kill(child.pid, signal.SIGKILL)
        waiting = sampler.sample(tokens(IDS), 2, params)  # which the client sends again by itself
    with process(directory, tmp_path, port):
        with pytest.raises((RetryableException, tinker.NotFoundError)):
            lost.result(timeout=60)
        after = waiting.result(timeout=60)
        assert [s.tokens for s in after.sequences] == [s.tokens for s in before.sequences]
        again = service.create_training_client_from_state_with_optimizer(state).result()
        rest = service.create_rest_client()
        (found,) = rest.list_checkpoints(trained.model_id).result().checkpoints
        assert (found.tinker_path, found.user_metadata) == (state, {"step": "1"})
        judge = service.create_lora_training_client("tiny", rank=4, seed=1).result()
        judge.forward_backward([example(IDS, 5)], "cross_entropy").result()
        judge.optim_step(ADAM).result()
        for one in (again, judge):
            one.forward_backward([example(IDS, 5)], "cross_entropy").result()
            one.optim_step(ADAM).result()
        scored = [
            one.forward([example(IDS, 5)], "cross_entropy").result().metrics["loss:sum"] for one in (again, judge)
        ]
        assert scored[0] == scored[1]


@pytest.mark.filterwarnings("ignore:DEPRECATED")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_resumed_model_is_the_one_that_was_not_stopped(tmp_path: Path, dtype: torch.dtype) -> None:
    """In the same server, in a model that trained something else, and after a restart: to the bit, in bf16 too."""

    def engine() -> NativeEngine:
        return NativeEngine(model().to(dtype), tokenizer(), EngineConfig(page_size=4, kv_tokens=4096))

    def train(trained: tinker.TrainingClient, steps: int = 1) -> list[float]:
        for _ in range(steps):
            trained.forward_backward([example(IDS, 5)], "cross_entropy").result()
            trained.optim_step(SMALL).result()
        (found,) = trained.forward([example(IDS, 5)], "cross_entropy").result().loss_fn_outputs
        return list(found["logprobs"].data)

    with serving(tmp_path, engine()) as url:
        service = client(url)
        live = service.create_lora_training_client("tiny", rank=4, seed=1).result()
        train(live, 3)
        path = live.save_state("one").result().path
        other = service.create_lora_training_client("tiny", rank=4, seed=2).result()
        train(other)
        other.load_state_with_optimizer(path).result()
        again = service.create_training_client_from_state_with_optimizer(path).result()
        onward = train(live, 8)
        assert train(again, 8) == onward
        assert train(other, 8) == onward
    with serving(tmp_path, engine()) as url:
        assert train(client(url).create_training_client_from_state_with_optimizer(path).result(), 8) == onward


@pytest.mark.check
@pytest.mark.filterwarnings("ignore:DEPRECATED")
def test_an_older_state_in_bf16_is_read_rounded_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = NativeEngine(model().to(torch.bfloat16), tokenizer(), EngineConfig(page_size=4, kv_tokens=4096))
    with serving(tmp_path, engine) as url:
        trained = client(url).create_lora_training_client("tiny", rank=4, seed=1).result()
        trained.forward_backward([example(IDS, 5)], "cross_entropy").result()
        trained.optim_step(SMALL).result()
        path = trained.save_state("one").result().path
        (file,) = tmp_path.rglob("optimizer.safetensors")
        saved = load_file(file)
        assert any(name.startswith("weight.") for name in saved)
        save_file({name: t for name, t in saved.items() if not name.startswith("weight.")}, file)
        before = trained.forward([example(IDS, 5)], "cross_entropy").result().metrics
        trained.load_state_with_optimizer(path).result()
        assert trained.forward([example(IDS, 5)], "cross_entropy").result().metrics == before
    assert "has no fp32 weights" in caplog.text


@pytest.mark.slow
def test_twenty_kills_lose_nothing_that_was_saved(directory: Path, tmp_path: Path, port: int) -> None:
    """A client saves as fast as it can; after each kill, every state whose save was answered is there and loads."""
    rng, total = random.Random(0), 0
    saved: dict[str, float] = {}
    for turn in range(21):
        with process(directory, tmp_path, port) as child:
            service = client(f"http://127.0.0.1:{port}")
            for path, loss in saved.items():
                one = service.create_training_client_from_state_with_optimizer(path).result()
                found = one.forward([example(IDS, 5)], "cross_entropy").result().metrics["loss:sum"]
                assert found == loss or path.endswith("/latest")  # a newer one may have been saved and not answered
            total, saved = total + len(saved), {}
            if turn == 20:
                break
            trained = service.create_lora_training_client("tiny", rank=2, seed=turn).result()
            kill = threading.Timer(0.3 + rng.random(), os.kill, (child.pid, signal.SIGKILL))
            kill.start()
            try:
                for step in itertools.count():
                    trained.forward_backward([example(IDS, 5)], "cross_entropy")
                    trained.optim_step(ADAM)
                    loss = trained.forward([example(IDS, 5)], "cross_entropy")
                    states = [trained.save_state(f"step-{step}"), trained.save_state("latest", overwrite=True)]
                    value = loss.result(timeout=3).metrics["loss:sum"]
                    for state in states:
                        saved[state.result(timeout=3).path] = value
            except Exception:
                kill.join()
            child.join(20)
    assert total > 40


# -- other people's ids and hostile bodies -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("states"), make_engine()) as found:
        yield found


@pytest.fixture(scope="module")
def service(url: str) -> tinker.ServiceClient:
    return client(url)


def post(url: str, path: str, body: Any = None, key: str = "tml-tests", **options: Any) -> httpx.Response:
    options |= {"json": body} if body is not None else {}
    return httpx.post(f"{url}/api/v1/{path}", headers={"X-API-Key": key}, **options)


def said(response: httpx.Response) -> str:
    text: str = response.json()["error"]["message"]
    return text


@pytest.mark.slow
def test_ids_of_one_key_are_unknown_to_another(url: str, service: tinker.ServiceClient) -> None:
    mine = service.create_lora_training_client("tiny", rank=2).result()
    state = mine.save_state("mine").result().path
    sampler = mine.save_weights_and_get_sampling_client().result()
    session = mine.model_id.partition(":")[0]
    other = {"key": "tml-other"}
    assert post(url, "get_info", {"model_id": mine.model_id}).status_code == 200
    for path, body in {
        "get_info": {"model_id": mine.model_id},
        "unload_model": {"model_id": mine.model_id},
        "optim_step": {"model_id": mine.model_id, "adam_params": {}, "seq_id": 3},
        "save_weights": {"model_id": mine.model_id, "path": "x", "seq_id": 3},
        "session_heartbeat": {"session_id": session},
        f"sessions/{session}/finish": {},
        "create_model": {"session_id": session, "model_seq_id": 9, "base_model": "tiny", "lora_config": {"rank": 1}},
        "create_sampling_session": {"session_id": session, "sampling_session_seq_id": 7, "base_model": "tiny"},
        "join_sampling_session": {"sampling_session_id": sampler._sampling_session_id},
        "weights_info": {"tinker_path": state},
        "retrieve_future": {"request_id": f"{mine.model_id}:1"},
        "asample": {
            "sampling_session_id": sampler._sampling_session_id,
            "seq_id": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
            "sampling_params": {"max_tokens": 1},
        },
    }.items():
        found = post(url, path, body, **other)
        assert found.status_code == (410 if path == "retrieve_future" else 404), path
        assert "There is no " in said(found), path
    theirs = client(url, "tml-other").create_rest_client()
    assert theirs.list_training_runs().result().training_runs == []
    assert theirs.list_user_checkpoints().result().checkpoints == []
    for call in (theirs.delete_checkpoint_from_tinker_path, theirs.get_external_weights_urls):
        with pytest.raises((tinker.NotFoundError, ValueError)):
            call(state).result()
    with pytest.raises(tinker.NotFoundError):
        theirs.set_checkpoint_ttl_from_tinker_path(state, 3600).result()
    with pytest.raises(tinker.NotFoundError):
        client(url, "tml-other").create_sampling_client(model_path=state).result()
    with pytest.raises(tinker.RequestFailedError, match="There is no checkpoint"):
        client(url, "tml-other").create_training_client_from_state(state).result()
    ours = client(url, "tml-tests").create_rest_client()
    assert state in [c.tinker_path for c in ours.list_user_checkpoints().result().checkpoints]
    assert ours.get_weights_info_by_tinker_path(state).result().lora_rank == 2
    run = ours.get_training_run(mine.model_id).result()
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == state
    ours.set_checkpoint_ttl_from_tinker_path(state, 3600).result()
    assert ours.get_training_run(mine.model_id).result().last_checkpoint.expires_at is not None
    ours.delete_checkpoint_from_tinker_path(state).result()
    assert ours.list_checkpoints(mine.model_id).result().checkpoints == []


@pytest.mark.check
def test_a_request_that_is_sent_twice_is_carried_out_once(url: str, service: tinker.ServiceClient) -> None:
    one, two = (service.create_lora_training_client("tiny", rank=2, seed=1).result() for _ in range(2))
    for trained, times in ((one, 1), (two, 3)):
        trained.forward_backward([example(IDS, 5)], "cross_entropy").result()
        body = {"model_id": trained.model_id, "adam_params": {"learning_rate": 0.01}, "seq_id": 2}
        ids = {post(url, "optim_step", body).json()["request_id"] for _ in range(times)}
        assert len(ids) == 1
        assert post(url, "retrieve_future", {"request_id": ids.pop()}).json()["type"] == "optim_step"
        trained._reserve_request_ids(1)
        trained._turn_counter += 1
    scores = [t.forward([example(IDS, 5)], "cross_entropy").result().metrics["loss:sum"] for t in (one, two)]
    assert scores[0] == scores[1]


def test_requests_run_in_the_client_s_order(url: str, service: tinker.ServiceClient) -> None:
    trained = service.create_lora_training_client("tiny", rank=2, seed=1).result()
    late = {"model_id": trained.model_id, "path": "late", "seq_id": 2}
    promise = post(url, "save_weights", late).json()["request_id"]
    first = {"model_id": trained.model_id, "path": "first", "seq_id": 1}
    other = post(url, "save_weights", first).json()["request_id"]
    for request_id in (promise, other):
        assert post(url, "retrieve_future", {"request_id": request_id}).json()["type"] == "save_weights"
    rest = client(url, "tml-tests").create_rest_client()
    names = [c.checkpoint_id for c in rest.list_checkpoints(trained.model_id).result().checkpoints]
    assert names == ["weights/late", "weights/first"]  # the newest first


@pytest.mark.parametrize(
    ("path", "options", "status", "words"),
    [
        ("forward_backward", {"content": b"\xff\xff\xff"}, 422, "no ForwardBackwardRequest"),
        ("forward_backward", {"content": b""}, 404, "There is no model"),
        ("create_session", {"content": b"{"}, 422, "Invalid JSON"),
        ("create_session", {"json": {"tags": 3}}, 422, "tags: "),
        (
            "create_session",
            {"json": {"tags": [], "user_metadata": None, "sdk_version": "1", "x": 1}},
            422,
            "x: Extra inputs",
        ),
        (
            "optim_step",
            {"json": {"adam_params": {"learning_rate": "much"}, "model_id": "m"}},
            422,
            "learning_rate: Input",
        ),
        ("retrieve_future", {"json": {"request_id": "x"}}, 410, "There is no such request"),
        ("magic", {"json": {}}, 404, "POST /api/v1/magic is not served here; docs/tinker.md"),
        ("copy_weights", {"json": {}}, 404, "is not served here"),
        (
            "asample",
            {"json": {"prompt": {"chunks": []}, "sampling_params": {}}},
            400,
            "asample needs sampling_session_id",
        ),
    ],
)
def test_a_wrong_body_is_refused_with_a_sentence(
    url: str, path: str, options: dict[str, Any], status: int, words: str
) -> None:
    found = post(url, path, **options)
    assert found.status_code == status
    assert words in said(found)


def hostile() -> Iterator[tuple[str, Any]]:
    """Messages that parse, and cannot be computed."""
    from tinker.proto import tinker_public_pb2 as pb

    def message(**tensor: Any) -> Any:
        made = pb.ForwardBackwardRequest(loss_fn="cross_entropy")
        one = made.data.add()
        one.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
        one.loss_fn_inputs["target_tokens"].CopyFrom(pb.Tensor(**tensor))
        return made

    raw = np.array([1, 2]).tobytes()
    yield "no data", pb.ForwardBackwardRequest(loss_fn="cross_entropy")
    yield "at most 8388608 values", message(dtype=pb.DTYPE_INT64, dense=raw, shape=[2, 1 << 40])
    yield "at most 8388608 values", message(dtype=pb.DTYPE_INT64, dense=raw, shape=[-2, -1])
    yield "are no int64 numbers", message(dtype=pb.DTYPE_INT64, dense=raw[:-1])
    yield "has the dtype 77", message(dtype=77, dense=raw)
    yield "not those of its shape", message(dtype=pb.DTYPE_INT64, dense=raw, shape=[3])
    yield "give int64 of", message(dtype=pb.DTYPE_FLOAT32, dense=np.zeros(2, np.float32).tobytes())
    yield "give int64 of", message(dtype=pb.DTYPE_INT64, dense=raw[:8])
    for crow, col in (([0, 1, 1], [5]), ([0, 2, 1], [0]), ([1, 1, 1], [0]), ([0, 1], [0]), ([0, 1, 1], [-1])):
        csr = pb.SparseCsr(values=raw[:8], crow_indices=np.array(crow).tobytes(), col_indices=np.array(col).tobytes())
        yield "its indices do not fit", message(dtype=pb.DTYPE_INT64, sparse_csr=csr, shape=[2, 3])
    empty = message(dtype=pb.DTYPE_INT64, dense=raw)
    del empty.data[0].model_input[:]
    yield "model_input is empty", empty
    picture = message(dtype=pb.DTYPE_INT64, dense=raw)
    picture.data[0].model_input.add().image.data = b"x"
    yield "data[0].model_input[1] is an image. Qwen3ForCausalLM takes no pictures", picture
    long = message(dtype=pb.DTYPE_INT64, dense=raw)
    long.data[0].model_input[0].encoded_text.tokens = np.zeros(600, np.int32).tobytes()
    yield "more than the model's 512 positions", long
    without = message(dtype=pb.DTYPE_INT64, dense=raw)
    del without.data[0].loss_fn_inputs["target_tokens"]
    yield "no loss_fn_inputs['target_tokens']", without


@pytest.mark.slow
def test_what_cannot_be_computed_fails_alone(url: str, service: tinker.ServiceClient) -> None:
    trained, judge = (service.create_lora_training_client("tiny", rank=2, seed=1).result() for _ in range(2))
    count = 0
    for words, message in hostile():
        count += 1
        message.model_id, message.seq_id = trained.model_id, count
        request_id = post(url, "forward_backward", content=message.SerializeToString()).json()["request_id"]
        failed = post(url, "retrieve_future", {"request_id": request_id}).json()
        assert failed["category"] == "user", failed
        assert words in failed["error"]
    trained._reserve_request_ids(count)
    trained._turn_counter += count
    losses = []
    for one in (trained, judge):
        one.forward_backward([example(IDS, 5)], "cross_entropy").result()
        one.optim_step(ADAM).result()
        losses.append(one.forward([example(IDS, 5)], "cross_entropy").result().metrics["loss:sum"])
    assert losses[0] == losses[1]


def test_a_key_is_needed_where_there_is_one_and_files_have_signatures(tmp_path: Path) -> None:
    with serving(tmp_path, api_key="tml-secret") as url:
        assert post(url, "create_session", {}, key="tml-wrong").status_code == 401
        trained = client(url, "tml-secret").create_lora_training_client("tiny", rank=2).result()
        path = trained.save_weights_external("out").result().path
        rest = client(url, "tml-secret").create_rest_client()
        urls = rest.get_external_weights_urls(path).result().urls
        assert set(urls) == {"adapter_config.json", "adapter_model.safetensors"}
        address = urls["adapter_config.json"]
        assert httpx.get(address).json()["r"] == 2
        assert httpx.get(address[:-1] + ("0" if address[-1] != "0" else "1")).status_code == 403
        assert httpx.get(address.replace("adapter_config", "checkpoint")).status_code == 403
        assert httpx.get(address.partition("?")[0]).status_code == 403


def test_a_cancelled_sample_stops(url: str, service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="tiny").result()
    body = {
        "sampling_session_id": sampler._sampling_session_id,
        "seq_id": 99,
        "num_samples": 256,  # a second or two, if it does not stop
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 200, "stop": []},
    }
    request_id = post(url, "asample", body).json()["request_id"]
    assert post(url, "cancel_future", {"request_id": request_id}, key="tml-other").status_code == 200
    assert post(url, "cancel_future", {"request_id": request_id}).status_code == 200
    assert post(url, "retrieve_future", {"request_id": request_id}).json()["error"] == "The request was cancelled."
    began = time.monotonic()
    while httpx.get(f"{url}/health").json()["outstanding"] and time.monotonic() < began + 20:
        time.sleep(0.05)
    assert httpx.get(f"{url}/health").json()["outstanding"] == 0


def test_finishing_a_session_unloads_its_models(url: str, tmp_path: Path) -> None:
    with serving(tmp_path) as own:
        service = client(own)
        trained = service.create_lora_training_client("tiny", rank=2).result()
        trained.save_weights_and_get_sampling_client().result()
        kept = trained.save_weights_for_sampler("kept").result().path
        session = trained.model_id.partition(":")[0]
        assert post(own, f"sessions/{session}/finish", {}).status_code == 200
        assert post(own, "get_info", {"model_id": trained.model_id}).status_code == 404
        assert post(own, "session_heartbeat", {"session_id": session}).status_code == 410
        names = [p.name for p in tmp_path.glob("runs/*/sampler_weights/*")]
        assert names == ["kept"]
        sampler = client(own).create_sampling_client(model_path=kept).result()
        assert len(sampler.sample(tokens(IDS), 1, types.SamplingParams(max_tokens=3, stop=[])).result().sequences) == 1


def test_a_server_that_clients_could_not_use_does_not_start(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve_it = ["serve", str(directory), "--port", "0", "--device", "cpu", "--tinker"]
    (tmp_path / "file").touch()
    for more, words in (
        (["--api_key", "secret"], "sends no key that does not begin with 'tml-'"),
        (["--tinker_dir", str(tmp_path / "file")], "Cannot keep states in"),
    ):
        assert main([*serve_it, *more]) == 2
        assert words in capsys.readouterr().err
