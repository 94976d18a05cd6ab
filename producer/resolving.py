"""From a campaign file to a request: strict, defaults filled in, refused before anything expensive."""

import re
from pathlib import Path

from producer.adapters import adapter_of, pins_digest
from producer.contracts import CONTRACT_OF_RESIDENCY, DYNAMO, Contract, contract_of, execution_identity
from producer.grids import axes
from producer.nodes import nodes_needed
from schemas.canonical import digest, parse, read_model, read_yaml
from schemas.errors import Refusal
from schemas.launch import ExecutionIdentity, Strategy, strategy
from schemas.layout import system_file
from schemas.model_config import ModelConfig, read_model_config
from schemas.observation import PROBE_PROTOCOL
from schemas.points import PHASES, PointManifest
from schemas.profile import Profile
from schemas.quantization import fmha_label
from schemas.request import Campaign, Deployment, Request, ResolvedDeployment
from schemas.system import System

KV_ELEMENT_BYTES = {"bfloat16": 2, "half": 2, "fp8": 1, "int8": 1}
SECRET_NAME = re.compile(r"TOKEN(?!IZER|S)|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY")
LEAST_WEIGHT_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "fp8_static": 1.0}
"""Precision label -> bytes of one element; of a label without an entry, at least half a byte."""


def read_campaign(file: Path) -> Campaign:
    """The campaign of `file`; its name must be the file's."""
    campaign = parse(Campaign, read_yaml(file, "campaign"), file)
    if campaign.campaign != file.stem:
        raise Refusal("campaign", f"the file's name {file.stem!r}", repr(campaign.campaign), file)
    return campaign


def resolve(campaign: Campaign, file: Path) -> Request:
    """Fill in defaults, read the system and the model configs, and refuse what no engine could run.

    Raises:
        Refusal: naming the field of `file`, what was expected and what was found.
    """
    system_path = system_file(campaign.system)
    system = parse(System, read_yaml(system_path, "system"), system_path)
    if system.name != campaign.system:
        raise Refusal("name", f"the file's name {campaign.system!r}", repr(system.name), system_path)
    runtime = campaign.runtime_backend_version or campaign.backend_version
    adapter_of(runtime, file)
    if campaign.acceptance == "auto" and not system.embedded:
        raise Refusal(
            "acceptance", "a profile digest for each deployment: auto is for embedded systems", "'auto'", file
        )
    if isinstance(campaign.acceptance, dict):
        for name in sorted(campaign.acceptance.keys() - campaign.deployments.keys()):
            raise Refusal(f"acceptance.{name}", f"one of {', '.join(campaign.deployments)}", repr(name), file)
    _check_environment(campaign, file)
    for name, deployment in campaign.deployments.items():
        _check_nodes(name, deployment, campaign, system, file)
        _check_gres(name, deployment, campaign, file)
    _check_distinct(campaign, file)
    return Request(
        campaign=campaign.campaign,
        system=system,
        backend=campaign.backend,
        backend_version=campaign.backend_version,
        runtime_backend_version=runtime,
        environment=campaign.environment,
        deployments={
            name: _resolve_deployment(name, deployment, system, file)
            for name, deployment in sorted(campaign.deployments.items())
        },
    )


def _check_environment(campaign: Campaign, file: Path) -> None:
    """The engine's environment is part of each cell's identity: its values are written down, so none is a secret."""
    for name in campaign.environment:
        if SECRET_NAME.search(name.upper()):
            wanted = "its name alone, in execution.environment: what stands here is written into plans and artifacts"
            raise Refusal(f"environment.{name}", wanted, "a value", file)


def _check_nodes(name: str, deployment: Deployment, campaign: Campaign, system: System, file: Path) -> None:
    """The allocation is what the topology takes in equal parts: fewer nodes do not hold it, and its numbers are those
    of no other spread."""
    topology, per_node = deployment.topology, system.node.num_gpus_per_node
    nodes = campaign.execution_of(name).nodes
    found = f"tp {topology.tp} x dp {topology.dp}"
    if topology.gpus > nodes * per_node:
        where = f"{nodes} nodes of {system.name}" if nodes > 1 else system.name
        raise Refusal(f"deployments.{name}.topology", f"at most {nodes * per_node} GPUs of {where}", found, file)
    needed = nodes_needed(topology, per_node)
    if nodes != needed:
        wanted = f"{needed}, the fewest that take {found} in equal parts of at most {per_node} GPUs"
        raise Refusal(f"deployments.{name}.execution.nodes", wanted, nodes, file)


def _check_gres(name: str, deployment: Deployment, campaign: Campaign, file: Path) -> None:
    """A job that gets another number of GPUs than its engine takes wastes them or dies late."""
    gres = campaign.execution_of(name).gres
    nodes = campaign.execution_of(name).nodes
    gpus = deployment.topology.gpus // nodes
    if gres is not None and int(gres.rsplit(":", 1)[1]) != gpus:
        node = " on each node" if nodes > 1 else ""
        expected = f"{gres.rsplit(':', 1)[0]}:{gpus}, the GPUs of deployment {name}{node}"
        raise Refusal(f"deployments.{name}.execution.gres", expected, gres, file)


def _check_distinct(campaign: Campaign, file: Path) -> None:
    """A table tells deployments apart by model, topology and precision; by nothing else."""
    imported = [name for name, deployment in campaign.deployments.items() if deployment.artifacts is not None]
    if 0 < len(imported) < len(campaign.deployments):
        wanted = "artifacts for every deployment or for none: a table has values of one kind"
        raise Refusal("deployments", wanted, f"artifacts for {', '.join(imported)} only", file)
    seen: dict[str, str] = {}
    for name, deployment in campaign.deployments.items():
        selector = digest(
            {
                "model": deployment.model,
                "topology": deployment.topology.model_dump(),
                "precision": deployment.precision.model_dump(),
            }
        )
        if selector in seen:
            wanted = f"another model, topology or precision than {seen[selector]}: a table cannot tell them apart"
            raise Refusal(f"deployments.{name}", wanted, "the same", file)
        seen[selector] = name


def _check_topology(field: str, deployment: Deployment, config: ModelConfig, file: Path) -> Strategy:
    """The strategy of the deployment's topology; refuses what no launch or no producer has."""
    topology = deployment.topology
    if not config.num_experts and topology.dp > 1:
        wanted = "1 for a dense model: its data-parallel ranks are independent engines"
        raise Refusal(f"{field}.topology.dp", wanted, topology.dp, file)
    chosen = strategy(topology, config.num_experts > 0)
    if chosen is None:
        wanted = (
            "pure TP (moe_tp = tp), TEP (moe_ep = tp) or DEP (tp 1, moe_ep = dp)"
            if config.num_experts
            else "moe_tp and moe_ep 1 for a dense model"
        )
        found = f"tp {topology.tp}, dp {topology.dp}, moe_tp {topology.moe_tp}, moe_ep {topology.moe_ep}"
        raise Refusal(f"{field}.topology", wanted, found, file)
    return chosen


def _check_contract(
    field: str, deployment: Deployment, chosen: Strategy, identity: ExecutionIdentity | None, file: Path
) -> Contract:
    """The producer contract of the deployment; refuses here what that producer would refuse in a container."""
    contract = contract_of(identity)
    if deployment.artifacts is not None:
        if identity is not None:
            wanted = f"none: consumers bind the rows of {deployment.model} to its config, and to our own measuring"
            raise Refusal(f"{field}.artifacts", wanted, deployment.artifacts, file)
        contract = DYNAMO
    if contract is None:
        raise Refusal(
            f"native execution identity cell has no audited producer contract: {field}.engram_residency",
            f"one of {', '.join(CONTRACT_OF_RESIDENCY)}",
            deployment.engram_residency,
            file,
        )
    if chosen not in contract.strategies:
        wanted = f"one of {', '.join(contract.strategies)}: the {contract.name} producer runs nothing else"
        raise Refusal(f"{field}.topology", wanted, chosen, file)
    if deployment.warmup_iterations not in contract.warmup_iterations:
        found = "absent" if deployment.warmup_iterations is None else deployment.warmup_iterations
        wanted = _allowed_warmups(contract)
        raise Refusal(f"{field}.warmup_iterations", wanted, found, file)
    revision = deployment.model_revision or ""
    if contract.hex_revision and not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise Refusal(f"{field}.model_revision", "40 lowercase hex characters", repr(revision), file)
    if contract.execution_mode == "eager" and not deployment.engine.enforce_eager:
        raise Refusal(f"{field}.engine.enforce_eager", f"true: a {contract.name} cell is eager", "false", file)
    if contract.grid_origin != axes.ORIGIN and "grid" in deployment.model_fields_set:
        raise Refusal(f"{field}.grid", f"none: a {contract.name} cell measures {contract.grid_origin}", "a grid", file)
    return contract


def _allowed_warmups(contract: Contract) -> str:
    allowed = contract.warmup_iterations
    if isinstance(allowed, range):
        return f"--benchmark-warmup-iterations of Dynamo's run, {allowed[0]} to {allowed[-1]}"
    words = " or ".join("absent" if value is None else str(value) for value in allowed)
    return f"{words}: each point has warm-ups of its own"


def _check_precision(field: str, deployment: Deployment, config: ModelConfig, file: Path) -> None:
    """The labels of the table against what the checkpoint's config says: one rule each."""
    precision, quantization = deployment.precision, config.quantization
    if config.dtype != "bfloat16":
        raise Refusal(f"{field}.model", "a bfloat16 checkpoint: engines are launched so", config.dtype, file)
    if quantization.kv_cache not in (None, precision.kv_cache):
        wanted = f"{quantization.kv_cache!r}, which {deployment.model} declares"
        raise Refusal(f"{field}.precision.kv_cache", wanted, repr(precision.kv_cache), file)
    labels = {"gemm": quantization.gemm, "moe": quantization.moe}
    try:
        labels["fmha"] = fmha_label(precision.kv_cache, quantization, config.dtype)
    except ValueError as error:
        raise Refusal(f"{field}.precision.kv_cache", error, repr(precision.kv_cache), file) from None
    for label, expected in labels.items():
        found = getattr(precision, label)
        if found != expected:
            kv = f", KV-cache dtype {precision.kv_cache!r}" if label == "fmha" else ""
            raise Refusal(f"{field}.precision.{label}", f"{expected!r} of {deployment.model}{kv}", repr(found), file)


def _check_limits(field: str, deployment: Deployment, config: ModelConfig, system: System, file: Path) -> None:
    """Nothing asked for is larger than what the model, the system or the limits allow."""
    limits, grid = deployment.limits, deployment.grid
    kv_bytes = deployment.engine.kv_cache_memory_bytes or 0
    tp = deployment.topology.tp
    if config.footprint is not None:
        need = config.footprint
        element = KV_ELEMENT_BYTES[deployment.precision.kv_cache]
        token = need.kv_elements_per_token * element // min(tp, need.num_key_value_heads)
        if 0 < kv_bytes < token * limits.max_model_len:
            wanted = f"at least {token * limits.max_model_len}, one request of {limits.max_model_len} tokens"
            raise Refusal(f"{field}.engine.kv_cache_memory_bytes", wanted, kv_bytes, file)
        weights = need.weights * LEAST_WEIGHT_BYTES.get(config.quantization.gemm, 0.5) / tp
        if weights + kv_bytes > system.gpu.mem_capacity:
            wanted = f"weights and cache within the {system.gpu.mem_capacity} bytes of {system.name}"
            found = f"tp {tp} with at least {weights:.0f} bytes of weights and {kv_bytes} of cache"
            raise Refusal(f"{field}.topology", wanted, found, file)
    bounds = (
        ("engine.kv_cache_memory_bytes", kv_bytes, system.gpu.mem_capacity, f"the memory of {system.name} in bytes"),
        (
            "limits.max_model_len",
            limits.max_model_len,
            config.max_position_embeddings,
            f"max_position_embeddings of {deployment.model}",
        ),
        ("grid.prefill.new_tokens", grid.prefill.new_tokens, limits.max_num_tokens, "limits.max_num_tokens"),
        ("grid.prefill.batch_sizes", grid.prefill.batch_sizes, limits.max_batch_size, "limits.max_batch_size"),
        ("grid.decode.contexts", grid.decode.contexts, limits.max_model_len - 2, "limits.max_model_len - 2"),
        ("grid.decode.batch_sizes", grid.decode.batch_sizes, limits.max_batch_size, "limits.max_batch_size"),
    )
    for name, asked, bound, bound_name in bounds:
        largest = asked[-1] if isinstance(asked, tuple) else asked
        if largest is not None and largest > bound:
            raise Refusal(f"{field}.{name}", f"at most {bound}, {bound_name}", largest, file)


def _resolve_deployment(name: str, deployment: Deployment, system: System, file: Path) -> ResolvedDeployment:
    field = f"deployments.{name}"
    config = read_model_config(Path(deployment.model))
    chosen = _check_topology(field, deployment, config, file)
    identity = execution_identity(config.architecture, config.sha256, deployment.engram_residency)
    contract = _check_contract(field, deployment, chosen, identity, file)
    _check_precision(field, deployment, config, file)
    _check_limits(field, deployment, config, system, file)
    return ResolvedDeployment(
        model=deployment.model,
        model_revision=deployment.model_revision or f"config-{config.sha256}",
        config=config,
        worker_type=deployment.worker_type,
        parallel_strategy=chosen,
        topology=deployment.topology,
        precision=deployment.precision,
        limits=deployment.limits,
        engine=deployment.engine,
        grid=deployment.grid,
        points=None if deployment.points is None else read_points(Path(deployment.points)),
        profile=deployment.profile,
        profile_sha256=None if deployment.profile is None else digest(read_declared(Path(deployment.profile))),
        warmup_iterations=deployment.warmup_iterations,
        execution_identity=identity,
        contract=contract.name,
    )


def read_points(file: Path) -> PointManifest:
    """A point manifest of any version, as a user supplies it; nulls mean absent."""
    return read_model(PointManifest, file, "point manifest")


def read_declared(file: Path) -> Profile:
    """A declared profile: a profile file that a person wrote instead of a probe."""
    return read_model(Profile, file, "declared profile")


def launch_of(request: Request, deployment: ResolvedDeployment) -> dict[str, object]:
    """What an engine of this deployment is started as: the part of an identity that does not depend on points."""
    nodes = nodes_needed(deployment.topology, request.system.node.num_gpus_per_node)
    return {
        "system": request.system.name,
        "backend": request.backend,
        "runtime_backend_version": request.runtime_backend_version,
        "pins_sha256": pins_digest(adapter_of(request.runtime_backend_version, "request")),
        "model_config_sha256": deployment.config.sha256,
        **({"model_sidecar_sha256": deployment.config.sidecar_sha256} if deployment.config.sidecar_sha256 else {}),
        "model_revision": deployment.model_revision,
        "parallel_strategy": deployment.parallel_strategy,
        "topology": deployment.topology.model_dump(mode="json"),
        "precision": deployment.precision.model_dump(mode="json"),
        "limits": deployment.limits.model_dump(mode="json"),
        "engine": deployment.engine.model_dump(mode="json", exclude_none=True),
        "environment": request.environment,
        **({"nodes": nodes} if nodes > 1 else {}),
    }


def probe_digest(request: Request, deployment: ResolvedDeployment) -> str:
    """What a probe's records depend on: the launch and the meaning of the records."""
    return digest({"launch": launch_of(request, deployment), "probe_protocol": PROBE_PROTOCOL})


def import_digest(request: Request, deployment: ResolvedDeployment) -> str:
    """What a profile's name says: its probe, and which phases of it are imported when it is not both."""
    source = profile_digest(request, deployment)
    return source if deployment.phases == PHASES else digest({"probe": source, "phases": deployment.phases})


def profile_digest(request: Request, deployment: ResolvedDeployment) -> str:
    """What a deployment's profile comes from: its probe, or the declared profile."""
    return deployment.profile_sha256 or probe_digest(request, deployment)
