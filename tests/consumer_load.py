"""Load a published pair with the simulators' own loader and print every stored point with what the loader answers.

Runs in the consumer's environment: consumer_load.py SYSTEMS_ROOT. One JSON object a row:
{"workload_kind", "model_path", "stored_ms", "loaded_ms"}.
"""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
from aisimulate_core.sdk import ForwardPassPerfModelConfig, RustForwardPassPerfModel

KV_BYTES_PER_TOKEN = 1024
"""The linear profile's memory: this wheel is older than the `state` cache kind, and no latency depends on it."""


def profile(row: dict, config: dict) -> dict:
    return {
        "schema_version": 1,
        "model": row["model_path"],
        "model_revision": "local",
        "architecture": config["architectures"][0],
        "context_length": config["max_position_embeddings"],
        "num_experts": config.get("num_experts") or config.get("num_local_experts", 0),
        "provenance": "a campaign of passgrid",
        "deployments": [
            {
                **{name: row[name] for name in ("system", "backend", "backend_version")},
                **{name: row[name] for name in ("tp", "dp", "moe_tp", "moe_ep")},
                **{name: row[name] for name in row if name.endswith("_quant_mode")},
                "kv_cache_dtype": row["kv_cache_dtype"],
                "resources": {
                    "cache_layout": "linear",
                    "kv_bytes_per_token": KV_BYTES_PER_TOKEN,
                    "max_num_tokens": 2048,
                    "max_batch_size": 8,
                    "provenance": "a campaign of passgrid",
                },
            }
        ],
    }


def model_of(row: dict, root: Path) -> RustForwardPassPerfModel:
    config = json.loads((Path(row["model_path"]) / "config.json").read_text())
    return RustForwardPassPerfModel.best_available(
        ForwardPassPerfModelConfig(
            model=row["model_path"],
            system=row["system"],
            backend=row["backend"],
            backend_version=row["backend_version"],
            tp=row["tp"],
            pp=row["pp"],
            attention_dp=row["dp"],
            moe_tp_size=row["moe_tp"],
            moe_ep_size=row["moe_ep"],
            gemm_quant_mode=row["gemm_quant_mode"],
            moe_quant_mode=row["moe_quant_mode"],
            fmha_quant_mode=row["fmha_quant_mode"],
            comm_quant_mode=row["comm_quant_mode"],
            kvcache_quant_mode=row["kv_cache_dtype"],
            estimation_mode="fpm_interpolation",
            fallback_policy="deny",
            worker_type="aggregated",
            systems_paths=(str(root),),
            estimator_config={"fpm_interpolation": {"method": "direct"}, "correction": {"enabled": False}},
            fpm_profile=profile(row, config),
        )
    )


def scheduled(row: dict) -> dict:
    if row["workload_kind"] == "prefill":
        return {
            "num_prefill_requests": row["batch_size"],
            "sum_prefill_tokens": row["total_prefill_tokens"],
            "sum_prefill_kv_tokens": row["total_kv_read_tokens"],
        }
    return {"num_decode_requests": row["batch_size"], "sum_decode_kv_tokens": row["total_kv_read_tokens"]}


def main() -> None:
    root = Path(sys.argv[1])
    models: dict[str, RustForwardPassPerfModel] = {}
    # Its threads can outlive the interpreter, which then aborts: `read_table` of pyarrow 26 did, one run in twenty.
    parquet = pq.ParquetFile(next(root.rglob("fpm_forward_perf.parquet")), pre_buffer=False)
    for row in parquet.read(use_threads=False).to_pylist():
        model = models.setdefault(row["model_path"], None) or model_of(row, root)
        models[row["model_path"]] = model
        loaded = model.estimate_forward_pass_time_ms({"version": 1, "scheduled_requests": scheduled(row)})
        facts = {name: row[name] for name in ("workload_kind", "model_path")}
        print(json.dumps(facts | {"stored_ms": row["latency_ms"], "loaded_ms": loaded}))


if __name__ == "__main__":
    main()
