"""The endpoints of Tinker's API below ``/api/v1``, as the client of version 0.38 calls them.

A request that takes long is answered at once with the id of a future, and `retrieve_future` waits for it. What is not
here is answered with 404 and a sentence.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias
from urllib.parse import quote

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from pydantic import BaseModel
from tinker.types import (
    ClientConfigResponse,
    ClientDynamicConfigResponse,
    FutureRetrieveRequest,
    GetInfoRequest,
    JoinSamplingSessionRequest,
    SessionHeartbeatRequest,
    UnloadModelRequest,
)

from ..protocols.http import RefusedError, read_body
from ..protocols.keys import SIGNED, key_of
from .faults import Body, FaultError, read
from .service import Service
from .store import META, SCHEME, Checkpoint, stamp

POLL_S = 20.0
"""Seconds for which a client's call waits for a future."""
URL_S = 3600.0
"""Seconds for which the address of a file can be used."""
V1 = "/api/v1"
CONFIG = ClientConfigResponse(custom_loss_server_side=True, sample_join_sampling_session=True)
"""The settings that clients get: upload traced losses, and let the server number their copies."""
DYNAMIC = ClientDynamicConfigResponse(sample_cancel_enabled=True)
Answer: TypeAlias = dict[str, Any]
"""An answer of the service as JSON; the client's types of the same endpoint say what is in it."""
router = APIRouter(prefix=V1)


class TtlBody(BaseModel):
    """The body that sets when a checkpoint expires."""

    ttl_seconds: int | None


class WeightsInfoBody(BaseModel):
    """The body that asks what a checkpoint is."""

    tinker_path: str


class CancelBody(BaseModel):
    """The body that cancels a request."""

    request_id: str


def owner_of(key: bytes) -> str:
    """Return the sender of a key: a digest of it, so that ids of one key are unknown to others."""
    return hashlib.sha256(key).hexdigest()


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints of a service to a server."""
    app.state.training = service
    app.add_api_route("/metrics", metrics)
    app.include_router(router)


# -- what handlers depend on ------------------------------------------------------------------------------------------


async def served(http: Request) -> Service:
    service: Service = http.app.state.training
    return service


async def sender(http: Request) -> str:
    return owner_of(key_of(http.headers))


Served = Annotated[Service, Depends(served)]
Owner = Annotated[str, Depends(sender)]
Raw = Annotated[bytes, Depends(read_body)]


def read_as(kind: type[Body]) -> Any:
    """Return the dependency that reads a request's body as ``kind``."""

    async def body(raw: Raw) -> Body:
        return read(kind, raw)

    return Depends(body)


@dataclass(frozen=True)
class Page:
    """The part of a list that a client asks for."""

    offset: int
    limit: int

    def of(self, entries: Sequence[Any]) -> Sequence[Any]:
        return entries[self.offset : self.offset + self.limit]

    def cursor(self, entries: Sequence[Any]) -> dict[str, int]:
        """Return the client's `Cursor`."""
        return {"offset": self.offset, "limit": self.limit, "total_count": len(entries)}


async def page_of(offset: str = "0", limit: str = "20") -> Page:
    for name, text in (("offset", offset), ("limit", limit)):
        if not text.isdecimal() or len(text) > 9:
            raise FaultError(f"{name} is '{text[:20]}'; give a number of at least 0.")
    return Page(int(offset), int(limit))


async def checkpoint_of(service: Served, owner: Owner, run: str, kind: str, name: str) -> Checkpoint:
    return service.store.find(f"{SCHEME}{run}/{kind}/{name}", owner)


Paged = Annotated[Page, Depends(page_of)]
Stored = Annotated[Checkpoint, Depends(checkpoint_of)]


# -- the client itself ------------------------------------------------------------------------------------------------


@router.get("/healthz")
async def healthz() -> Answer:
    return {"status": "ok"}


@router.post("/client/config")
async def client_config() -> Answer:
    return CONFIG.model_dump()


@router.post("/client/dynamic_config")
async def client_dynamic_config() -> Answer:
    return DYNAMIC.model_dump()


@router.post("/telemetry")
async def telemetry(raw: Raw) -> Answer:
    return {"status": "accepted"}  # nothing of it is kept


@router.get("/get_server_capabilities")
async def get_server_capabilities(service: Served) -> Answer:
    model = {"model_name": service.name, "max_context_length": service.engine.longest}
    return {"supported_models": [model | {"trainable": True, "sampleable": True}]}


# -- sessions ---------------------------------------------------------------------------------------------------------


@router.post("/create_session")
async def create_session(service: Served, owner: Owner, raw: Raw) -> Answer:
    return service.create_session(owner, raw)


@router.post("/session_heartbeat")
async def session_heartbeat(
    service: Served, owner: Owner, body: Annotated[SessionHeartbeatRequest, read_as(SessionHeartbeatRequest)]
) -> Answer:
    return service.heartbeat(owner, body.session_id)


@router.get("/sessions")
async def sessions(service: Served, owner: Owner, page: Paged) -> Answer:
    return {"sessions": page.of([session.id for session in service.sessions.of(owner)])}


@router.get("/sessions/{name}")
async def session(service: Served, owner: Owner, name: str) -> Answer:
    return service.session_facts(owner, name)


@router.post("/sessions/{name}/finish")
async def finish_session(service: Served, owner: Owner, name: str) -> Answer:
    return await service.finish(owner, name)


# -- training ---------------------------------------------------------------------------------------------------------


@router.post("/create_model")
async def create_model(service: Served, owner: Owner, raw: Raw) -> Answer:
    return service.models.create(owner, raw).promise


@router.post("/get_info")
async def get_info(service: Served, owner: Owner, body: Annotated[GetInfoRequest, read_as(GetInfoRequest)]) -> Answer:
    return service.models.info(owner, body.model_id)


@router.post("/unload_model")
async def unload_model(
    service: Served, owner: Owner, raw: Raw, body: Annotated[UnloadModelRequest, read_as(UnloadModelRequest)]
) -> Answer:
    return service.models.unload_model(owner, body.model_id, len(raw)).promise


@router.post("/forward_backward")
async def forward_backward(service: Served, owner: Owner, raw: Raw) -> Answer:
    return service.forward_backward(owner, raw).promise


@router.post("/optim_step")
async def optim_step(service: Served, owner: Owner, raw: Raw) -> Answer:
    return service.optim_step(owner, raw).promise


@router.post("/create_custom_loss")
async def create_custom_loss(service: Served, owner: Owner, raw: Raw) -> Answer:
    return service.create_custom_loss(owner, raw).promise


@router.post("/save_weights")
async def save_weights(service: Served, owner: Owner, raw: Raw) -> Answer:
    return service.saving.save_weights(owner, raw).promise


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(service: Served, owner: Owner, raw: Raw) -> Answer:
    return service.saving.save_for_sampler(owner, raw).promise


@router.post("/save_weights_external")
async def save_weights_external(service: Served, owner: Owner, raw: Raw) -> Answer:
    return service.saving.save_external(owner, raw).promise


@router.post("/load_weights")
async def load_weights(service: Served, owner: Owner, raw: Raw) -> Answer:
    return service.saving.load_weights(owner, raw).promise


# -- sampling ---------------------------------------------------------------------------------------------------------


@router.post("/create_sampling_session")
async def create_sampling_session(service: Served, owner: Owner, raw: Raw) -> Answer:
    return service.create_sampler(owner, raw)


@router.post("/join_sampling_session")
async def join_sampling_session(
    service: Served, owner: Owner, body: Annotated[JoinSamplingSessionRequest, read_as(JoinSamplingSessionRequest)]
) -> Answer:
    return service.join_sampler(owner, body.sampling_session_id)


@router.get("/samplers/{name}")
async def sampler(service: Served, owner: Owner, name: str) -> Answer:
    return service.sampler_facts(owner, name)


@router.post("/asample")
async def asample(service: Served, owner: Owner, raw: Raw) -> Answer:
    return (await service.sample(owner, raw)).promise


# -- futures ----------------------------------------------------------------------------------------------------------


@router.post("/retrieve_future")
async def retrieve_future(
    service: Served, owner: Owner, body: Annotated[FutureRetrieveRequest, read_as(FutureRetrieveRequest)]
) -> Response:
    future = await service.futures.wait(body.request_id, owner, POLL_S)
    if future.reply is None:
        return JSONResponse({"type": "try_again", "request_id": future.id, "queue_state": "active"})
    if isinstance(future.reply, bytes):
        return Response(future.reply, media_type="application/x-protobuf")
    return JSONResponse(dict(future.reply))


@router.post("/cancel_future")
async def cancel_future(service: Served, owner: Owner, body: Annotated[CancelBody, read_as(CancelBody)]) -> Answer:
    service.futures.cancel(body.request_id, owner)
    return {}


# -- saved states -----------------------------------------------------------------------------------------------------


@router.get("/training_runs")
async def training_runs(service: Served, owner: Owner, page: Paged) -> Answer:
    runs = [run for run, _ in service.store.runs(owner)]
    return {
        "training_runs": [service.saving.run_facts(owner, run) for run in page.of(runs)],
        "cursor": page.cursor(runs),
    }


@router.get("/training_runs/{run}")
async def training_run(service: Served, owner: Owner, run: str) -> Answer:
    return service.saving.run_facts(owner, run)


@router.get("/training_runs/{run}/checkpoints")
async def checkpoints_of_run(service: Served, owner: Owner, run: str) -> Answer:
    service.store.run(run, owner)
    return {"checkpoints": [checkpoint.described() for checkpoint in service.store.checkpoints(run)]}


@router.get("/checkpoints")
async def checkpoints(service: Served, owner: Owner, page: Paged) -> Answer:
    stored = [one for run, _ in service.store.runs(owner) for one in service.store.checkpoints(run)]
    newest = sorted(stored, key=lambda checkpoint: -checkpoint.meta["saved"])
    return {
        "checkpoints": [checkpoint.described() for checkpoint in page.of(newest)],
        "cursor": page.cursor(newest),
    }


@router.delete("/training_runs/{run}/checkpoints/{kind}/{name}", status_code=204)
async def delete_checkpoint(service: Served, checkpoint: Stored) -> None:
    await service.saving.delete(checkpoint)


@router.put("/training_runs/{run}/checkpoints/{kind}/{name}/ttl", status_code=204)
async def set_ttl(service: Served, body: Annotated[TtlBody, read_as(TtlBody)], checkpoint: Stored) -> None:
    service.store.set_ttl(checkpoint, body.ttl_seconds)


@router.post("/weights_info")
async def weights_info(
    service: Served, owner: Owner, body: Annotated[WeightsInfoBody, read_as(WeightsInfoBody)]
) -> Answer:
    lora = service.store.find(body.tinker_path, owner).meta["lora"]
    parts = {key: lora[key] for key in ("train_unembed", "train_mlp", "train_attn")}
    rank = lora["rank"]
    return {"base_model": service.name, "is_lora": rank > 0, "lora_rank": rank or None, **parts}


# -- files ------------------------------------------------------------------------------------------------------------


@router.get("/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls")
async def external_weights_urls(service: Served, checkpoint: Stored, http: Request) -> Answer:
    until = int(time.time() + URL_S)
    server = str(http.base_url).rstrip("/")
    urls = {}
    for name in sorted(file.name for file in checkpoint.place.iterdir() if file.name != META):
        place = f"{checkpoint.run}/{checkpoint.kind}/{checkpoint.name}/{name}"
        query = f"until={until}&signature={_signature(service, place, until)}"
        urls[name] = f"{server}{SIGNED}{quote(place)}?{query}"
    return {"urls": urls, "expires": stamp(until)}


@router.get(f"{SIGNED.removeprefix(V1)}{{place:path}}")
async def file(service: Served, place: str, until: str = "", signature: str = "") -> Response:
    expected = _signature(service, place, int(until)) if until.isdecimal() else ""
    if not expected or not hmac.compare_digest(signature.encode(), expected.encode()):
        raise FaultError("The address of the file is not one that this server gave.", 403)
    path = service.store.root / "runs" / place
    if int(until) < time.time() or not path.is_file():
        raise FaultError("The address of the file has expired; ask for a new one.", 403)
    return FileResponse(path)


def _signature(service: Service, place: str, until: int) -> str:
    return hmac.new(service.secret, f"{until} {place}".encode(), hashlib.sha256).hexdigest()


async def metrics(service: Served) -> Response:
    return Response(service.metrics(), media_type="text/plain; version=0.0.4")


@router.api_route("/{rest:path}", methods=["GET", "POST", "PUT", "DELETE", "PATCH"], include_in_schema=False)
async def nothing(http: Request) -> Response:  # the last one, because it matches every path
    raise RefusedError(f"{http.method} {http.url.path} is not served here; docs/tinker.md lists what is.", 404)
