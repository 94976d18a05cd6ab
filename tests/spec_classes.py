"""Cache-spec classes of the engine that is first on the path: their fields, managers, and which can be told apart."""

import dataclasses
import json

import vllm
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_cache_spec_registry import _REGISTRY_KVCACHESPEC_LIST


def subclasses(of: type) -> list[type]:
    return [found for child in of.__subclasses__() for found in (child, *subclasses(child))]


def main() -> None:
    register_all_kvcache_specs(None)
    written = {
        "vllm": vllm.__version__,
        "file": kv_cache_interface.__file__,
        "fields": {one.__name__: [f.name for f in dataclasses.fields(one)] for one in subclasses(KVCacheSpec)},
        "mamba_types": list(MambaAttentionBackendEnum.__members__),
        "managers": {spec.__name__: known.manager_class.__name__ for spec, known in _REGISTRY_KVCACHESPEC_LIST.items()},
    }
    print(json.dumps(written))


if __name__ == "__main__":
    main()
