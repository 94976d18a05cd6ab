"""From a campaign file to a request: strict, defaults filled in, refused before anything expensive."""

from pathlib import Path

from producer.adapters import adapter_of, pins_digest
from schemas.canonical import digest, parse, read_yaml
from schemas.errors import Refusal
from schemas.layout import system_file
from schemas.model_config import read_model_config
from schemas.observation import PROBE_PROTOCOL
from schemas.request import Campaign, Deployment, Request, ResolvedDeployment, strategy
from schemas.system import System


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
    for name, deployment in campaign.deployments.items():
        _check_gres(name, deployment, campaign, file)
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


def _check_gres(name: str, deployment: Deployment, campaign: Campaign, file: Path) -> None:
    """A job that gets another number of GPUs than its engine takes wastes them or dies late."""
    gres = (deployment.execution or campaign.execution).gres
    gpus = deployment.topology.gpus
    if gres is not None and int(gres.rsplit(":", 1)[1]) != gpus:
        expected = f"{gres.rsplit(':', 1)[0]}:{gpus}, the GPUs of deployment {name}"
        raise Refusal(f"deployments.{name}.execution.gres", expected, gres, file)


def _resolve_deployment(name: str, deployment: Deployment, system: System, file: Path) -> ResolvedDeployment:
    field = f"deployments.{name}"
    config = read_model_config(Path(deployment.model))
    topology, limits, engine = deployment.topology, deployment.limits, deployment.engine

    parallel_strategy = strategy(topology, config.num_experts > 0)
    if parallel_strategy is None:
        wanted = (
            "pure TP (moe_tp = tp), TEP (moe_ep = tp) or DEP (tp 1, moe_ep = dp)"
            if config.num_experts
            else "dp, moe_tp and moe_ep 1 for a dense model"
        )
        found = f"tp {topology.tp}, dp {topology.dp}, moe_tp {topology.moe_tp}, moe_ep {topology.moe_ep}"
        raise Refusal(f"{field}.topology", wanted, found, file)
    if topology.dp > 1:
        raise Refusal(f"{field}.topology.dp", "1: data-parallel ranks are not measured yet", topology.dp, file)
    if topology.gpus > system.node.num_gpus_per_node:
        raise Refusal(
            f"{field}.topology",
            f"at most {system.node.num_gpus_per_node} GPUs of {system.name}",
            f"tp {topology.tp} x dp {topology.dp}",
            file,
        )
    if (engine.kv_cache_memory_bytes or 0) > system.gpu.mem_capacity:
        raise Refusal(
            f"{field}.engine.kv_cache_memory_bytes",
            f"at most the {system.gpu.mem_capacity} bytes of {system.name}",
            engine.kv_cache_memory_bytes,
            file,
        )
    if limits.max_model_len > config.max_position_embeddings:
        raise Refusal(
            f"{field}.limits.max_model_len",
            f"at most max_position_embeddings {config.max_position_embeddings} of {deployment.model}",
            limits.max_model_len,
            file,
        )
    for label in ("gemm", "moe", "fmha"):
        found = getattr(deployment.precision, label)
        if found != config.dtype:
            raise Refusal(f"{field}.precision.{label}", f"{config.dtype!r} of {deployment.model}", repr(found), file)
    bounds = (
        ("prefill.new_tokens", deployment.grid.prefill.new_tokens, limits.max_num_tokens, "limits.max_num_tokens"),
        ("prefill.batch_sizes", deployment.grid.prefill.batch_sizes, limits.max_batch_size, "limits.max_batch_size"),
        ("decode.contexts", deployment.grid.decode.contexts, limits.max_model_len - 2, "limits.max_model_len - 2"),
        ("decode.batch_sizes", deployment.grid.decode.batch_sizes, limits.max_batch_size, "limits.max_batch_size"),
    )
    for axis, values, bound, bound_name in bounds:
        if values and values[-1] > bound:
            raise Refusal(f"{field}.grid.{axis}", f"at most {bound} ({bound_name})", values[-1], file)
    return ResolvedDeployment(
        model=deployment.model,
        model_revision=deployment.model_revision or f"config-{config.sha256}",
        config=config,
        worker_type=deployment.worker_type,
        parallel_strategy=parallel_strategy,
        topology=topology,
        precision=deployment.precision,
        limits=limits,
        engine=engine,
        grid=deployment.grid,
    )


def launch_of(request: Request, deployment: ResolvedDeployment) -> dict[str, object]:
    """What an engine of this deployment is started as: the part of an identity that does not depend on points."""
    return {
        "system": request.system.name,
        "backend": request.backend,
        "runtime_backend_version": request.runtime_backend_version,
        "pins_sha256": pins_digest(adapter_of(request.runtime_backend_version, "request")),
        "model_config_sha256": deployment.config.sha256,
        "model_revision": deployment.model_revision,
        "parallel_strategy": deployment.parallel_strategy,
        "topology": deployment.topology.model_dump(mode="json"),
        "precision": deployment.precision.model_dump(mode="json"),
        "limits": deployment.limits.model_dump(mode="json"),
        "engine": deployment.engine.model_dump(mode="json", exclude_none=True),
        "environment": request.environment,
    }


def probe_digest(request: Request, deployment: ResolvedDeployment) -> str:
    """What a probe's records depend on: the launch and the meaning of the records."""
    return digest({"launch": launch_of(request, deployment), "probe_protocol": PROBE_PROTOCOL})
