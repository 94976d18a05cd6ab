"""What a worker's record says of the model that it loaded: the deployment's, under the labels of its precision."""

from collections.abc import Iterator
from pathlib import Path

from producer.engine import Launch
from producer.resolving import LEAST_WEIGHT_BYTES
from schemas.errors import Refusal
from schemas.model_config import text_settings
from schemas.observation import LoadedModel, WorkerRecord
from schemas.quantization import Quantization, detect, fmha_label
from schemas.request import ResolvedDeployment

from record_differences import differ

ENGINE_METHODS = {"modelopt": ("modelopt", "modelopt_fp4", "modelopt_mixed")}
"""`quant_method` of a checkpoint that vLLM loads by another name, told by its algorithm; all others keep theirs
(0.33.0, config/model.py `_verify_quantization`, layers/quantization/modelopt.py `override_quantization_method`)."""


def loading_findings(launch: Launch, model: LoadedModel) -> Iterator[str]:
    """How every engine is told to load (producer/engine.py `engine_arguments`), and that labels are of a method."""
    yield from differ(
        {
            "model.revision": (None, model.revision),  # a checkpoint is a folder: none is handed over
            "model.dtype": ("bfloat16", model.dtype),
            "model.load_format": (launch.engine.load_format, model.load_format),
        }
    )


def method_findings(launch: Launch, model: LoadedModel) -> Iterator[str]:
    """What the labels alone say of the quantization: whether there is one, and by which method of which block."""
    labels = (launch.precision.gemm, launch.precision.moe)
    block, method = model.quantization_config, model.quantization
    if all(label == "bfloat16" for label in labels):
        return
    if block is None:
        yield f"model.quantization_config: expected a block of labels {', '.join(labels)}, found none"
    if method is None or (block is not None and method not in _engine_methods(block.get("quant_method"))):
        yield f"model.quantization: expected the method of quantization_config, found {method}"


def _engine_methods(declared: object) -> tuple[str, ...]:
    """What vLLM may call the method that a block declares; ModelOpt's blocks may declare none."""
    method = str(declared or "modelopt")
    return ENGINE_METHODS.get(method, (method,))


def model_findings(deployment: ResolvedDeployment, worker: WorkerRecord) -> Iterator[str]:
    """The model that the deployment names, in the dtype that every engine is launched with."""
    model, config = worker.model, deployment.config
    yield from differ(
        {
            "model.model": (deployment.model, model.model),
            "model.config_sha256": (config.sha256, model.config_sha256),
            "model.sidecar_sha256": (config.sidecar_sha256, model.sidecar_sha256),
            "model.architectures": (config.architecture, next(iter(model.architectures), None)),
            "model.model_type": (config.model_type, model.model_type),
        }
    )
    yield from loading_findings(deployment, model)
    if len(set(model.architectures)) < len(model.architectures):
        yield f"model.architectures: expected each once, found {model.architectures}"
    memory = worker.hardware.total_memory_bytes
    most = memory - sum(storage.size_bytes for storage in worker.cache.storages)
    if model.weights_bytes > most:
        found = f"{model.weights_bytes} of weights"
        yield f"model.weights_bytes: expected at most {most} beside the cache in {memory} of memory, found {found}"
    least = _least_weights(deployment)
    if model.weights_bytes < least:
        yield (
            f"model.weights_bytes: expected at least {least} of embeddings and feed-forward layers in "
            f"{deployment.precision.gemm}, found {model.weights_bytes}"
        )


def _least_weights(deployment: ResolvedDeployment) -> int:
    """Bytes that a rank's shard has at least. A footprint does not say which part of a MoE is experts."""
    config = deployment.config
    if config.footprint is None or config.num_experts:
        return 1
    element = LEAST_WEIGHT_BYTES.get(config.quantization.gemm, 0.5)
    return int(config.footprint.weights * element / deployment.topology.tp)


def _loaded_quantization(deployment: ResolvedDeployment, model: LoadedModel) -> Quantization:
    """Labels of the block that the engine loaded, by the rule of planning (`schemas.quantization.detect`).

    Which layers an exclusion means depends on the layers that there are: of a quantized checkpoint its config is read.

    Raises:
        Refusal: a block without labels.
    """
    config, block = Path(deployment.model) / "config.json", model.quantization_config
    if block is None:
        return detect({}, None, deployment.config.dtype, config)
    # vLLM writes an empty method into a block without one (0.33.0, transformers_utils/model_arch_config_convertor.py).
    declared = {key: value for key, value in block.items() if (key, value) != ("quant_method", "")}
    settings = text_settings(config.parent) | {"quantization_config": declared}
    return detect(settings, None, deployment.config.dtype, config)


def precision_findings(deployment: ResolvedDeployment, model: LoadedModel) -> Iterator[str]:
    """The labels of the table are those of the loaded checkpoint, and the engine's method is the checkpoint's."""
    try:
        loaded = _loaded_quantization(deployment, model)
    except Refusal as refusal:
        yield f"model.{refusal.field}: expected {refusal.expected}, found {refusal.found}"
        return
    methods = (None,) if loaded.method is None else ENGINE_METHODS.get(loaded.method, (loaded.method,))
    if model.quantization not in methods:
        wanted = " or ".join(str(method) for method in methods)
        yield f"model.quantization: expected {wanted} of quantization_config, found {model.quantization}"
    precision = deployment.precision
    yield from differ(
        {
            "precision.gemm": (loaded.gemm, precision.gemm),
            "precision.moe": (loaded.moe, precision.moe),
        }
    )
    if precision.kv_cache == "half":  # imports, and has no FMHA label: planning refuses it
        return
    try:
        label = fmha_label(precision.kv_cache, loaded, deployment.config.dtype)
    except ValueError as error:
        yield f"precision.kv_cache: expected {error}, found {precision.kv_cache}"
        return
    if precision.fmha != label:
        yield f"precision.fmha: expected {label}, found {precision.fmha}, KV-cache dtype {precision.kv_cache}"
