"""A training service that speaks Tinker's API: the unmodified client of that name trains and samples adapters here.

    client --protobuf, JSON--> `wire`, `routes` --> `service` --> `training`, `sampling` --> the thread of the engine

One frozen base model serves everybody. Each model of a client is a LoRA adapter in it (`adapters`) with an optimiser of
its own (`training`). The data of a request become trees by their equal prefixes and are scored and differentiated
together (`compute`), by one of the named losses (`losses`) or a graph that the client has traced (`graph`). Answers
are fetched later by their ids (`futures`). What is saved lies in a directory (`store`) and survives the process. The
client's package brings the types and the protobuf; nothing of it is copied here. Read `routes` first.
"""
