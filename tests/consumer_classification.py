"""The seed classification of a published pair by the consumers' own validator: what it says of rows and sidecar.

Runs in the consumer's environment: consumer_classification.py PAIR_FOLDER. Prints the cells that it takes for dense, or
ends with its complaint.
"""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
from collector.fpm_forward.database import _validate_kv_seed_classification, published_dense_synthetic_cells


def main() -> None:
    folder = Path(sys.argv[1])
    sidecar = json.loads((folder / "fpm_forward_perf.metadata.json").read_text())
    _validate_kv_seed_classification(sidecar, pq.read_table(folder / "fpm_forward_perf.parquet").to_pylist())
    print(json.dumps(sorted(published_dense_synthetic_cells(sidecar))))


if __name__ == "__main__":
    main()
