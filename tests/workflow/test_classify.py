"""The classification of real artifacts' rows, and of what is made of them: twelve dense points in both formats."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cells import GLM_IDENTITY
from conftest import ROOT
from native_samples import cell_of, one_phase, sample
from test_native_samples import ranks_of

from schemas.canonical import digest
from schemas.merged import MergedArtifact
from schemas.model_config import read_model_config

from dense_policy import read_config
from merge_ranks import findings, merge
from rank_checks import check_rows
from seed_regime import Classification, classify

DENSE = "skip:dense_model_content_insensitive"
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
TWELVE = list(itertools.product((1, 2, 4), (128, 256, 512, 1030)))
"""Batch sizes and tokens read."""


def twelve(name: str, tmp_path: Path, **change: Any) -> tuple[MergedArtifact, dict[str, Any]]:
    """A real artifact's decode run, merged, with twelve rows of the kind that it has; and its document."""
    document = one_phase(name, "decode") | change
    merged = merge(ranks_of(tmp_path, document), "")
    rows = [
        msgspec.structs.replace(
            merged.results[0],
            point=msgspec.structs.replace(
                merged.results[0].point, benchmark_id=number, batch_size=batch, total_kv_read_tokens=read
            ),
        )
        for number, (batch, read) in enumerate(TWELVE, 1)
    ]
    return msgspec.structs.replace(merged, results=rows), document


def classified(merged: MergedArtifact, document: dict[str, Any], engine: Any = "own", **change: Any) -> Classification:
    cell = cell_of(document, **{"model_config_sha256": digest(CONFIG)} | change)
    return classify(cell, merged, [document["engine"] if engine == "own" else engine], CONFIG)


FORMATS = {"d17_dense_agg": DENSE, "d161_dense_agg": "fake_fallback"}
"""Real dense artifacts, and the native regime that their producer writes."""


@pytest.mark.parametrize("name", FORMATS)
def test_twelve_of_twelve_qualified_points_in_both_formats(name: str, tmp_path: Path):
    merged, document = twelve(name, tmp_path)
    assert {row.kv_seed_regime for row in merged.results} == {FORMATS[name]}
    assert classified(merged, document) == Classification([DENSE] * 12, [], [])


@pytest.mark.parametrize("release", ["1.6.1", "1.7"])
def test_dynamos_own_run_of_the_demos_dense_model(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Artifacts and config as they are: Dynamo names the model by the folder that it ran in."""
    monkeypatch.chdir(ROOT)
    document = json.loads((ROOT / "tests/fixtures/dynamo" / release / "decode.json").read_text())
    model = "config/models/qwen3-tiny"
    config_sha256 = read_model_config(Path(model)).sha256
    cell = cell_of(document, model_config_sha256=config_sha256).model_copy(update={"model": model})
    merged = merge(ranks_of(tmp_path, document), "")
    assert classify(cell, merged, [document["engine"]], read_config(cell)) == Classification([DENSE] * 4, [], [])


@pytest.mark.parametrize("name", FORMATS)
def test_none_of_twelve_without_cache_evidence(name: str, tmp_path: Path):
    merged, document = twelve(name, tmp_path)
    engine = document["engine"] | {"kv_cache": document["engine"]["kv_cache"] | {"groups": []}}
    assert classified(merged, document, engine) == Classification(
        ["fake_fallback"] * 12, [], ["rank 0 engine.kv_cache.groups: expected a list with a spec, found []"]
    )
    assert classified(merged, document, None).labels == ["fake_fallback"] * 12


def test_a_skip_of_the_configuration_alone_qualifies_no_point(tmp_path: Path):
    merged, document = twelve("d17_dense_agg", tmp_path)
    bare = [msgspec.structs.replace(row, kv_seed_regime=None) for row in merged.results]
    assert classified(msgspec.structs.replace(merged, results=bare), document).labels == ["fake_fallback"] * 12


@pytest.mark.parametrize("name", FORMATS)
def test_points_without_a_warm_up_block_are_no_dense_points(name: str, tmp_path: Path):
    merged, document = twelve(name, tmp_path)
    found = classified(msgspec.structs.replace(merged, kvwarm=msgspec.UNSET), document)
    assert found.labels == ["legacy"] * 12
    assert len(found.conflicts) == (12 if name == "d17_dense_agg" else 0)


def test_a_native_dense_skip_with_a_fallback_stamp_is_refused(tmp_path: Path):
    document = one_phase("d17_dense_agg", "decode")
    for block in ("results", "iteration_groups"):
        document[block][0]["point"]["sample_reasons"].append("kvwarm_fake_fallback")
    ranks = ranks_of(tmp_path, document)
    (refusal,) = check_rows(ranks.artifacts[0], ranks.artifacts[0].iteration_groups, ranks.files[0])
    assert f"{DENSE}: expected stamps [], found ['kvwarm_fake_fallback']" in str(refusal)


def test_a_native_fallback_without_its_stamp_is_refused(tmp_path: Path):
    document = one_phase("d17_dense_agg", "decode")
    document["results"][0]["kv_seed_regime"] = "fake_fallback"
    ranks = ranks_of(tmp_path, document)
    (refusal,) = check_rows(ranks.artifacts[0], ranks.artifacts[0].iteration_groups, ranks.files[0])
    assert "fake_fallback: expected stamps ['kvwarm_fake_fallback'], found []" in str(refusal)


def test_a_skip_that_its_own_block_does_not_give_is_a_conflict(tmp_path: Path):
    merged, document = twelve("d17_dense_agg", tmp_path)
    found = classified(msgspec.structs.replace(merged, kvwarm=merged.kvwarm | {"skip_reason": "flag_off"}), document)
    assert found.labels == ["fake_fallback"] * 12
    assert found.conflicts[0] == (
        f"benchmark_id=1 kv_seed_regime {DENSE}: expected kvwarm.skip_reason dense_model_content_insensitive, "
        "found flag_off"
    )


def test_a_dense_skip_of_a_config_bound_cell_has_no_label(tmp_path: Path):
    merged, document = twelve("d17_dense_agg", tmp_path)
    found = classified(merged, document, execution_identity=GLM_IDENTITY)
    assert found.labels == []
    assert len(found.conflicts) == 12


def two_ranks(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> list[str]:
    """What stands against a decode run of two ranks, the second one changed."""
    documents = [one_phase("d17_dense_agg", "decode") for _ in range(2)]
    for rank, document in enumerate(documents):
        document["dp"] = {"rank": rank, "size": 2}
    change(documents[1])
    return [str(refusal) for refusal in findings(ranks_of(tmp_path, *documents))]


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("enabled", False, "kvwarm.enabled: expected True of benchmark.json, found False"),
        ("warm_eligible", True, "kvwarm.warm_eligible: expected False of benchmark.json, found True"),
        (
            "skip_reason",
            "peer_ineligible",
            "kvwarm.skip_reason: expected dense_model_content_insensitive of benchmark.json, found peer_ineligible",
        ),
    ],
)
def test_ranks_that_disagree_on_the_warm_up_are_refused(field: str, value: Any, line: str, tmp_path: Path):
    lines = two_ranks(tmp_path, lambda document: document["kvwarm"].update({field: value}))
    assert [found for found in lines if found.startswith(line)]


def test_ranks_that_disagree_on_a_points_regime_are_refused(tmp_path: Path):
    """One rank wrote the newer format, one the older."""

    def older(document: dict[str, Any]) -> None:
        document["results"][0]["kv_seed_regime"] = "fake_fallback"
        document["results"][0]["point"]["sample_reasons"].append("kvwarm_fake_fallback")

    lines = two_ranks(tmp_path, older)
    wanted = f"kv_seed_regime benchmark_id=1: expected one regime over all ranks, found ['fake_fallback', '{DENSE}']"
    assert [found for found in lines if found.startswith(wanted)]


def test_a_real_moe_run_is_real(tmp_path: Path):
    document = one_phase("d17_full_moe_agg", "decode")
    merged = merge(ranks_of(tmp_path, document), "")
    found = classify(cell_of(document, parallel_strategy="tep"), merged, [document["engine"]], None)
    assert found == Classification(["real_kv", "real_kv"], [], [])


@pytest.mark.parametrize(
    "name",
    ["d161_dense_agg", "d17_dense_agg", "d17_full_moe_agg", "d161_moe_realkv_agg", "d17_rows_v3_realseed_prefill"],
)
def test_cached_prefill_of_a_real_artifact_is_not_applicable(name: str, tmp_path: Path):
    document = sample(name) if name.endswith("prefill") else one_phase(name, "prefill")
    merged = merge(ranks_of(tmp_path, document), "")
    rows = len(document["results"])
    found = classify(cell_of(document), merged, [document["engine"]], None)
    assert found == Classification(["n/a"] * rows, [], [])
