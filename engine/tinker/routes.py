"""The endpoints of Tinker's API below ``/api/v1``, as the client of version 0.38 calls them.

A request that takes long is answered at once with the id of a future, and `retrieve_future` waits for it. What is not
here is answered with 404 and a sentence.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
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
from .faults import FaultError, read, refused
from .service import Service
from .store import META, SCHEME, stamp

POLL_S = 20.0
"""Seconds for which a client's call waits for a future."""
URL_S = 3600.0
"""Seconds for which the address of a file can be used."""
V1 = "/api/v1"


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
    secret = secrets.token_bytes(32)

    def on(method: str, path: str, work: Callable[[str, bytes, Request], Any]) -> None:
        async def endpoint(http: Request) -> Response:
            raw = await read_body(http)
            try:
                made = work(owner_of(key_of(http.headers)), raw, http)
                made = await made if isinstance(made, Awaitable) else made
            except FaultError as fault:
                raise refused(fault) from None
            return made if isinstance(made, Response) else JSONResponse(made)

        app.add_api_route(f"{V1}{path}", endpoint, methods=[method])

    # -- the client itself

    on("GET", "/healthz", lambda owner, raw, http: {"status": "ok"})
    on("POST", "/client/config", lambda owner, raw, http: CONFIG.model_dump())
    on("POST", "/client/dynamic_config", lambda owner, raw, http: DYNAMIC.model_dump())
    on("POST", "/telemetry", lambda owner, raw, http: {"status": "accepted"})  # nothing of it is kept
    on("GET", "/get_server_capabilities", lambda owner, raw, http: _capabilities(service))

    # -- sessions

    on("POST", "/create_session", lambda owner, raw, http: service.create_session(owner, raw))
    on(
        "POST",
        "/session_heartbeat",
        lambda o, raw, http: service.heartbeat(o, read(SessionHeartbeatRequest, raw).session_id),
    )
    on("GET", "/sessions", lambda owner, raw, http: _sessions(service, owner, http))
    on("GET", "/sessions/{id}", lambda owner, raw, http: service.session_facts(owner, http.path_params["id"]))
    on("POST", "/sessions/{id}/finish", lambda owner, raw, http: service.finish(owner, http.path_params["id"]))

    # -- training

    for path, begin in (
        ("/create_model", service.models.create),
        ("/forward_backward", service.forward_backward),
        ("/optim_step", service.optim_step),
        ("/create_custom_loss", service.create_custom_loss),
        ("/save_weights", service.saving.save_weights),
        ("/save_weights_for_sampler", service.saving.save_for_sampler),
        ("/save_weights_external", service.saving.save_external),
        ("/load_weights", service.saving.load_weights),
    ):
        on("POST", path, lambda owner, raw, http, begin=begin: begin(owner, raw).promise)  # type: ignore[misc]
    on("POST", "/get_info", lambda owner, raw, http: service.models.info(owner, read(GetInfoRequest, raw).model_id))

    def unload(owner: str, raw: bytes, http: Request) -> dict[str, Any]:
        return service.models.unload_model(owner, read(UnloadModelRequest, raw).model_id, len(raw)).promise

    on("POST", "/unload_model", unload)

    # -- sampling

    async def asample(owner: str, raw: bytes, http: Request) -> dict[str, Any]:
        return (await service.sample(owner, raw)).promise

    on("POST", "/asample", asample)
    on("POST", "/create_sampling_session", lambda owner, raw, http: service.create_sampler(owner, raw))
    on(
        "POST",
        "/join_sampling_session",
        lambda owner, raw, http: service.join_sampler(owner, read(JoinSamplingSessionRequest, raw).sampling_session_id),
    )
    on("GET", "/samplers/{id}", lambda owner, raw, http: service.sampler_facts(owner, http.path_params["id"]))

    # -- futures

    async def retrieve(owner: str, raw: bytes, http: Request) -> Response:
        future = await service.futures.wait(read(FutureRetrieveRequest, raw).request_id, owner, POLL_S)
        if future.reply is None:
            return JSONResponse({"type": "try_again", "request_id": future.id, "queue_state": "active"})
        if isinstance(future.reply, bytes):
            return Response(future.reply, media_type="application/x-protobuf")
        return JSONResponse(dict(future.reply))

    def cancel(owner: str, raw: bytes, http: Request) -> dict[str, Any]:
        service.futures.cancel(read(CancelBody, raw).request_id, owner)
        return {}

    on("POST", "/retrieve_future", retrieve)
    on("POST", "/cancel_future", cancel)

    # -- saved states

    def checkpoint_path(http: Request) -> str:
        parts = http.path_params
        return f"{SCHEME}{parts['run']}/{parts['kind']}/{parts['name']}"

    async def delete(owner: str, raw: bytes, http: Request) -> Response:
        await service.saving.delete(service.store.find(checkpoint_path(http), owner))
        return Response(status_code=204)

    def set_ttl(owner: str, raw: bytes, http: Request) -> Response:
        ttl = read(TtlBody, raw).ttl_seconds
        service.store.set_ttl(service.store.find(checkpoint_path(http), owner), ttl)
        return Response(status_code=204)

    def checkpoints(owner: str, raw: bytes, http: Request) -> dict[str, Any]:
        run = http.path_params["run"]
        service.store.run(run, owner)
        return {"checkpoints": [one.described() for one in service.store.checkpoints(run)]}

    def info(owner: str, raw: bytes, http: Request) -> dict[str, Any]:
        lora = service.store.find(read(WeightsInfoBody, raw).tinker_path, owner).meta["lora"]
        parts = {key: lora[key] for key in ("train_unembed", "train_mlp", "train_attn")}
        rank = lora["rank"]
        return {"base_model": service.name, "is_lora": rank > 0, "lora_rank": rank or None, **parts}

    of_run = "/training_runs/{run}"
    of_checkpoint = f"{of_run}/checkpoints/{{kind}}/{{name}}"
    on("GET", "/training_runs", lambda owner, raw, http: _runs(service, owner, http))
    on("GET", of_run, lambda owner, raw, http: service.saving.run_facts(owner, http.path_params["run"]))
    on("GET", f"{of_run}/checkpoints", checkpoints)
    on("GET", "/checkpoints", lambda owner, raw, http: _checkpoints(service, owner, http))
    on("DELETE", of_checkpoint, delete)
    on("PUT", f"{of_checkpoint}/ttl", set_ttl)
    on("POST", "/weights_info", info)

    # -- files

    def signature(place: str, until: int) -> str:
        return hmac.new(secret, f"{until} {place}".encode(), hashlib.sha256).hexdigest()

    def urls(owner: str, raw: bytes, http: Request) -> dict[str, Any]:
        checkpoint, until = service.store.find(checkpoint_path(http), owner), int(time.time() + URL_S)
        names = sorted(file.name for file in checkpoint.place.iterdir() if file.name != META)
        found = {}
        for name in names:
            place = f"{checkpoint.run}/{checkpoint.kind}/{checkpoint.name}/{name}"
            query = f"until={until}&signature={signature(place, until)}"
            found[name] = f"{str(http.base_url).rstrip('/')}{SIGNED}{quote(place)}?{query}"
        return {"urls": found, "expires": stamp(until)}

    def file(owner: str, raw: bytes, http: Request) -> Response:
        place, until = http.path_params["place"], http.query_params.get("until", "")
        given = http.query_params.get("signature", "")
        if not until.isdecimal() or not hmac.compare_digest(given.encode(), signature(place, int(until)).encode()):
            raise FaultError("The address of the file is not one that this server gave.", 403)
        path = service.store.root / "runs" / place
        if int(until) < time.time() or not path.is_file():
            raise FaultError("The address of the file has expired; ask for a new one.", 403)
        return FileResponse(path)

    on("GET", f"{of_checkpoint}/external_weights_urls", urls)
    on("GET", f"{SIGNED.removeprefix(V1)}{{place:path}}", file)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics(), media_type="text/plain; version=0.0.4")

    async def nothing(http: Request) -> Response:
        raise RefusedError(f"{http.method} {http.url.path} is not served here; docs/tinker.md lists what is.", 404)

    app.add_api_route(f"{V1}/{{rest:path}}", nothing, methods=["GET", "POST", "PUT", "DELETE", "PATCH"])


CONFIG = ClientConfigResponse(custom_loss_server_side=True, sample_join_sampling_session=True)
"""The settings that clients get: upload traced losses, and let the server number their copies."""
DYNAMIC = ClientDynamicConfigResponse(sample_cancel_enabled=True)


def _capabilities(service: Service) -> dict[str, Any]:
    model = {"model_name": service.name, "max_context_length": service.engine.longest}
    return {"supported_models": [model | {"trainable": True, "sampleable": True}]}


def _page(http: Request, found: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return a page of a list and the client's `Cursor`."""
    numbers = []
    for name, default in (("offset", 0), ("limit", 20)):
        given = http.query_params.get(name, str(default))
        if not given.isdecimal() or len(given) > 9:
            raise FaultError(f"{name} is '{given[:20]}'; give a number of at least 0.")
        numbers.append(int(given))
    offset, limit = numbers
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


def _runs(service: Service, owner: str, http: Request) -> dict[str, Any]:
    page, cursor = _page(http, [run for run, _ in service.store.runs(owner)])
    return {"training_runs": [service.saving.run_facts(owner, run) for run in page], "cursor": cursor}


def _checkpoints(service: Service, owner: str, http: Request) -> dict[str, Any]:
    found = [one for run, _ in service.store.runs(owner) for one in service.store.checkpoints(run)]
    page, cursor = _page(http, sorted(found, key=lambda one: -one.meta["saved"]))
    return {"checkpoints": [one.described() for one in page], "cursor": cursor}


def _sessions(service: Service, owner: str, http: Request) -> dict[str, Any]:
    page, _ = _page(http, [session.id for session in service.sessions.of(owner)])
    return {"sessions": page}
